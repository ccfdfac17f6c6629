"""Codex session files, as ``traces.logs.codex`` reads them.

Not in such a file: tools. Encrypted reasoning stands as a digest.
"""

from __future__ import annotations

from collections.abc import Iterator

from eval.diagnose.chat import Call, Request
from eval.diagnose.logs.base import Line, LogFormat, Skip, faulty
from traces.logs.codex import CodexCall, CodexLog, is_record
from traces.logs.fields import FieldError, get


def _read(lines: Iterator[Line], skip: Skip) -> Iterator[Call]:
    log = CodexLog()

    def called(call: CodexCall | None) -> Iterator[Call]:
        try:
            if call is not None:
                yield _call(call, log.session)
        except FieldError as error:
            skip(faulty("" if call is None else call.source, error))

    for where, value in lines:
        try:
            ended = log.add(value, where)
        except FieldError as error:
            skip(faulty(where, error))
            continue
        yield from called(ended)
    yield from called(log.end())


FORMAT = LogFormat("codex", is_record, _read)


def _call(call: CodexCall, session: str) -> Call:
    usage = call.usage or {}
    return Call(
        where=call.source,
        request=Request(call.messages, compacted=call.compacted),
        session=session,
        answer=(call.answer,),
        prompt_tokens=get(usage, "input_tokens", int, "payload.info.last_token_usage"),
        cached_tokens=get(usage, "cached_input_tokens", int, "payload.info.last_token_usage"),
        at_s=call.sent_s,
        model=call.model,
    )
