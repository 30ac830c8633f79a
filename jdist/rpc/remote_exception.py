"""Exceptions that cross from one worker to another, as their own type.

`describe` runs where the exception was raised and makes plain values of it; `rebuild`
runs at the caller. A type is rebuilt only if the caller allows its name, and only if
the rebuilt exception says the same as the original; else a `RemoteError` tells it all.
"""

import traceback
from typing import Any

from jdist.rpc.errors import ForbiddenFunction, RemoteError
from jdist.rpc.functions import FunctionTable, own_name

_LONGEST_TEXT = 100_000
_MOST_ARGS = 1000


def describe(error: BaseException, worker: str) -> dict[str, Any]:
    """All that is to be known of an exception, as values of the codec.

    Args:
      error: The exception.
      worker: Name of the worker that raised it; empty for an exception that is sent as
        a value, which gets no note about where it came from.
    """
    args: Any = error.args
    if isinstance(error, OSError) and error.filename is not None:
        args = (error.errno, error.strerror, error.filename, None, error.filename2)
    known = {key: item for key, item in vars(error).items() if _is_plain(item)}
    notes = known.pop("__notes__", [])
    return {
        "type": own_name(type(error)) or type(error).__name__,
        "text": _text(error),
        "args": args if _is_plain(args) else None,
        "state": known,
        "notes": [_cut(note) for note in notes if isinstance(note, str)],
        "traceback": _traceback(error),
        "worker": worker,
    }


def rebuild(description: dict[str, Any], functions: FunctionTable) -> Exception:
    """The exception again: its own type, or `RemoteError` where that cannot be.

    The remote traceback and the worker's name are added as a note, and are attributes
    `remote_traceback` and `remote_worker`.

    Raises:
      ValueError: `description` is not what `describe` makes.
    """
    _check(description)
    error = _own_type(description, functions) or RemoteError(_told(description))
    worker, text = description["worker"], description["traceback"]
    notes = list(description["notes"])
    if worker:
        notes.append(f"Raised on worker {worker!r}:\n{text}")
    # The base class's __setattr__, because a frozen dataclass may be an exception.
    for name, value in (
        ("__notes__", notes),
        ("remote_worker", worker),
        ("remote_traceback", text),
    ):
        BaseException.__setattr__(error, name, value)
    return error


def _own_type(
    description: dict[str, Any], functions: FunctionTable
) -> Exception | None:
    args, state = description["args"], description["state"]
    if args is None:
        return None
    try:
        kind = functions.resolve(description["type"])
    except ForbiddenFunction:
        return None
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    try:
        error = kind(*args)
        for name, value in state.items():
            BaseException.__setattr__(error, name, value)
        return error if _text(error) == description["text"] else None
    except Exception:  # noqa: BLE001 - any constructor may fail in any way; then the
        # original is told in words, see `_told`.
        return None


def _told(description: dict[str, Any]) -> str:
    return (
        f"Failed to create original exception type {description['type']!r} here. "
        f"Original exception on remote side was {description['type']}: "
        f"{description['text']}\n{description['traceback']}"
    )


def _check(description: Any) -> None:
    expected = {
        "type": str,
        "text": str,
        "args": (tuple, type(None)),
        "state": dict,
        "notes": list,
        "traceback": str,
        "worker": str,
    }
    if not isinstance(description, dict) or description.keys() != expected.keys():
        raise ValueError("An exception's description has other fields than it should.")
    for name, kind in expected.items():
        if not isinstance(description[name], kind):
            raise ValueError(f"An exception's {name} is {description[name]!r}.")
    names = [*description["notes"], *description["state"]]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("An exception's notes and attributes must have text.")


def _text(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception:  # noqa: BLE001 - an exception's own __str__ may be broken
        return "<the exception's text cannot be made>"


def _traceback(error: BaseException) -> str:
    try:
        return _cut("".join(traceback.format_exception(error)))
    except Exception:  # noqa: BLE001 - so may what traceback calls
        return "<the traceback cannot be made>"


def _cut(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def _is_plain(value: Any, depth: int = 5) -> bool:
    """Whether the value is made of scalars and containers alone, and is not big."""
    if value is None or type(value) in (bool, int, float):
        return True
    if type(value) in (str, bytes):
        return len(value) <= _LONGEST_TEXT
    if type(value) in (tuple, list) and depth and len(value) <= _MOST_ARGS:
        return all(_is_plain(item, depth - 1) for item in value)
    if type(value) is dict and depth and len(value) <= _MOST_ARGS:
        return all(
            _is_plain(item, depth - 1) for pair in value.items() for item in pair
        )
    return False
