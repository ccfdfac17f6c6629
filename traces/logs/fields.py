"""Typed access to foreign JSON, with errors that name the field. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


class FieldError(ValueError):
    """A wrong value; ``field`` is its path within the record."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def within(self, at: str) -> FieldError:
        """The same error as the one who holds the record sees it."""
        return FieldError(path(at, self.field), str(self))


def path(at: str, name: str) -> str:
    """The path of a field of ``at``; either may be empty."""
    return f"{at}.{name}" if at and name and not name.startswith("[") else f"{at}{name}"


def get(value: dict[str, Any], name: str, kind: type | tuple[type, ...], at: str = "") -> Any:
    """``value[name]``, or None where it is missing or null.

    Raises:
        FieldError: it is of another type.
    """
    found = value.get(name)
    if found is None:
        return None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(found, kind) or (isinstance(found, bool) and bool not in kinds):
        wanted = " or ".join(_KINDS[k] for k in kinds)
        raise FieldError(path(at, name), f"must be {wanted}")
    return found


_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list", bool: "a boolean"}
_MILLISECONDS = 1e11  # a larger time cannot be seconds since 1970
_LATEST = 1e12  # seconds


def posix_seconds(value: Any, name: str) -> float | None:
    """Seconds since 1970 of a number (seconds or milliseconds) or an ISO 8601 text (without a zone: UTC); None of None.

    Raises:
        FieldError: it is none of them, or out of range; ``name`` is the field.
    """
    if value is None:
        return None
    try:
        found = iso_seconds(value) if isinstance(value, str) else float(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise FieldError(name, "must be seconds, milliseconds or an ISO-8601 time") from error
    found = found / 1000 if found > _MILLISECONDS else found
    if isinstance(value, bool) or not 0 <= found < _LATEST:
        raise FieldError(name, "is out of range")
    return found


def iso_seconds(text: str) -> float:
    """POSIX seconds of an ISO-8601 time; without a zone it is UTC.

    Raises:
        ValueError, OverflowError: it is none.
    """
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def iso_time(record: dict[str, Any], name: str = "timestamp") -> float | None:
    """The ISO-8601 time of a record's field in seconds since 1970; None where it is missing.

    Raises:
        FieldError: it is none.
    """
    text = get(record, name, str)
    try:
        return None if text is None else iso_seconds(text)
    except (ValueError, OverflowError) as error:
        raise FieldError(name, "must be an ISO-8601 time") from error
