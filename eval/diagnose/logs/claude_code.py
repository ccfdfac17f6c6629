"""Claude Code session files, as ``traces.logs.claude_code`` reads them.

Not in such a file: system prompt and tools, so a change of those shows only as a miss in the server's own count
(``usage``).
"""

from __future__ import annotations

from collections.abc import Iterator

from eval.diagnose.chat import Call, Request
from eval.diagnose.logs.base import Line, LogFormat, Skip, faulty
from traces.logs.claude_code import MAIN, ClaudeCall, ClaudeLog, is_event
from traces.logs.fields import FieldError
from traces.logs.requests import usage_of


def _read(lines: Iterator[Line], skip: Skip) -> Iterator[Call]:
    log = ClaudeLog()

    def called(call: ClaudeCall) -> Iterator[Call]:
        try:
            yield _call(call, log.session)
        except FieldError as error:
            skip(faulty(call.source, error))

    for where, value in lines:
        try:
            ended = log.add(value, where)
        except FieldError as error:
            skip(faulty(where, error))
            continue
        if ended is not None:
            yield from called(ended)
    for call in log.end():
        yield from called(call)


FORMAT = LogFormat("claude-code", is_event, _read)


def _call(call: ClaudeCall, session: str) -> Call:
    usage = usage_of({"usage": call.usage})
    return Call(
        where=call.source,
        request=Request(call.messages, compacted=call.compacted),
        session=f"{session}/{'' if call.flow == MAIN else call.flow}",
        answer=() if call.answer is None else (call.answer,),
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        at_s=call.sent_s,
        model=call.model if isinstance(call.model, str) else "",
    )
