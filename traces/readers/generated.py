"""Generated traces: ``generated:sessions=20,seed=1`` instead of a path, no file at all.

The settings are the fields of ``traces.generate.GeneratorSettings``, and ``preset=tiny`` for the sizes of the
demo; other settings change the preset's. Nothing is unsupported: what the generator makes is a full trace.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from traces.generate import PRESETS, GeneratorSettings, generate_sessions
from traces.model import Session, TraceError
from traces.readers.base import Reading, TraceFormat, register

PREFIX = "generated:"


def _matches(path: str) -> bool:
    return path.startswith(PREFIX)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return generate_sessions(parse_settings(path))


def parse_settings(path: str) -> GeneratorSettings:
    """Settings from ``generated:name=value,...``.

    Raises:
        TraceError: naming the setting that is unknown or out of range.
    """
    values: dict[str, object] = {}
    preset = "default"
    for part in filter(None, path.removeprefix(PREFIX).split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise TraceError(f"'{part}' is not name=value, as in generated:sessions=20,seed=1", file=path)
        if name == "preset":
            preset = value
        else:
            values[name] = value
    if preset not in PRESETS:
        raise TraceError(f"unknown preset '{preset}'; known are {', '.join(PRESETS)}", file=path, field="preset")
    try:
        return GeneratorSettings.model_validate({**PRESETS[preset].model_dump(), **values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(GeneratorSettings.model_fields)
        raise TraceError(f"{first['msg'].lower()}; settings are {known}", file=path, field=name) from error


register(TraceFormat("generated", _matches, _read))
