"""Exceptions that travel between workers and keep their type.

`describe` runs where the exception was raised and makes plain values of it; `rebuild`
runs at the caller. A type is rebuilt only if the caller allows its name and the rebuilt
exception has the original's text; otherwise a `RemoteError` carries both. A group of
exceptions arrives as one, flat: those in groups within it are described and rebuilt
each for itself.
"""

import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError, RemoteError
from jdist.rpc.codec.codes import unpacked
from jdist.rpc.codec.functions import FunctionTable, own_name

T = TypeVar("T")

_LONGEST = 100_000
"""Largest number of characters of a text, and of contents of arguments, in an error."""

_DEEPEST = 20
_MOST = 1000
"""Largest number of exceptions of a group."""

_LARGEST = 10 * _LONGEST
"""Number of characters of a group's exceptions after which the rest stays behind."""

_SCALARS = frozenset({type(None), bool, int, float, np.bool_, np.int32, np.int64})
_SCALARS |= {np.float32, np.float64}


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    """What `describe` makes, as it is checked on arrival."""

    type: str
    text: str
    args: tuple[Any, ...] | None
    state: dict[str, Any]
    notes: list[str]
    traceback: str
    worker: str
    exceptions: list["_Description"] | None

    def __post_init__(self) -> None:
        if any(map(_is_special, self.state)):
            raise ValueError("its attributes must have ordinary names")


def describe(error: BaseException, worker: str) -> dict[str, Any]:
    """Describe an exception by plain values: type, text, attributes and traceback.

    Arguments and attributes that are not plain scalars, texts and containers of them
    stay behind; an exception with such arguments arrives as a `RemoteError`. Causes
    and contexts are part of the traceback's text. Of a very large group those at the
    end stay behind.

    Args:
      error: The exception.
      worker: Name of the worker that raised it; empty for an exception that is sent as
        a value, which gets no note about where it came from.

    Example:
      >>> describe(KeyError("w"), "worker1")["text"]
      "'w'"
    """
    described = _described(error, worker)
    if isinstance(error, BaseExceptionGroup):
        inner: list[dict[str, Any]] = []
        described["exceptions"] = inner
        room = _LARGEST
        for one in _members(error):
            if len(inner) == _MOST or room <= 0:
                # The group's traceback tells of the first ones.
                rest = RemoteError("More exceptions stayed behind: they are too many.")
                inner.append(_described(rest, worker))
                break
            inner.append(_described(one, worker))
            room -= len(repr(inner[-1]))
    return described


def _members(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """The exceptions of a group and of the groups within it."""
    rest: list[BaseException] = [group]
    while rest:
        error = rest.pop()
        if isinstance(error, BaseExceptionGroup):
            # Past whatever a class makes of the attribute.
            rest += reversed(BaseExceptionGroup.exceptions.__get__(error))
        else:
            yield error


def _described(error: BaseException, worker: str) -> dict[str, Any]:
    # Each part is read on its own: `args`, `__dict__` and `__notes__` may be properties
    # or hold anything, and an exception that cannot be described must be told all the
    # same, or its caller would wait for an answer that never comes.
    state: dict[str, Any] = {}
    notes: list[str] = []
    return {
        "type": own_name(type(error)) or type(error).__name__,
        "text": _text(error),
        "args": _attempt(lambda: _arguments(error), None),
        "state": _attempt(lambda: _state(error), state),
        "notes": _attempt(lambda: _notes(error), notes),
        "traceback": _traceback(error),
        "worker": worker,
        "exceptions": None,
    }


def rebuild(description: dict[str, Any], functions: FunctionTable) -> Exception:
    """Rebuild an exception as its own type, or as a `RemoteError`.

    It has its own type if `functions` allows that name and the rebuilt exception has
    the text of the original. Attributes `remote_worker` and `remote_traceback` say
    where it was first raised, and for every worker that it came through there is a
    note with the traceback there. `KeyboardInterrupt` and its like arrive as
    `RemoteError`: no key was pressed on this side. Every group is an `ExceptionGroup`,
    in which `except*` finds what it contains.

    Args:
      description: As `describe` made it.
      functions: Which types may be rebuilt: those it allows, Python's own, and those
        of `jax.errors` and NumPy.

    Raises:
      ProtocolError: `description` is not what `describe` makes.
    """
    rule = "A remote exception's description is malformed"
    described: _Description = unpacked(description, _Description, rule)
    exceptions = described.exceptions
    if exceptions is None:
        return _one(described, functions)
    # One more than are described, which tells of those left behind.
    if not 0 < len(exceptions) <= _MOST + 1:
        raise ProtocolError("A remote group has no exceptions, or too many.")
    if any(one.exceptions is not None for one in exceptions):
        raise ProtocolError("A remote group has a group in it.")
    inner = [_one(one, functions) for one in exceptions]
    return _marked(ExceptionGroup(described.text, inner), described)


def _one(description: _Description, functions: FunctionTable) -> Exception:
    error = _own_type(description, functions)
    if error is None:
        error = RemoteError(_told(description))
    return _marked(error, description)


def _marked(error: Exception, description: _Description) -> Exception:
    """The exception, with what is known of where it was raised."""
    worker, trace = description.worker, description.traceback
    notes = list(description.notes)
    if worker:
        origin = {"remote_worker": worker, "remote_traceback": trace}
        earlier = description.state.keys() & origin.keys()
        verb = "Passed on by" if earlier else "Raised on"
        notes.append(f"{verb} worker {worker!r}:\n{trace}")
        origin |= {name: description.state[name] for name in earlier}
        vars(error).update(origin)
    if notes:
        vars(error)["__notes__"] = notes
    return error


def _attempt(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except BaseException:  # noqa: BLE001 - the exception is described without this part
        return otherwise


def _arguments(error: BaseException) -> tuple[Any, ...] | None:
    args = error.args
    if isinstance(error, OSError) and error.filename is not None:
        # Its constructor takes more than it keeps in `args`.
        args = (error.errno, error.strerror, error.filename, None, error.filename2)
    return args if _is_plain(args) else None


def _state(error: BaseException) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(error).items()
        if type(name) is str and not _is_special(name) and _is_plain(value)
    }


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", [])
    return [_cut(note) for note in notes if isinstance(note, str)]


def _own_type(description: _Description, functions: FunctionTable) -> Exception | None:
    args = description.args
    try:
        kind = functions.resolve(description.type)
    except ForbiddenFunction:
        return None
    if args is None or not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        if kind.__module__ == "jax.errors":
            # Some want a tracer, which stays behind; made like this none is missed.
            error = kind.__new__(kind, *args)
        else:
            error = kind(*args)
        # `__new__` may return anything.
        if type(error) is not kind:
            return None
        # Straight into the dictionary: a frozen dataclass, too, may be an exception.
        vars(error).update(description.state)
    except Exception:  # noqa: BLE001 - a constructor may fail in any way: told in words
        return None
    # A constructor may take other arguments than `args` keeps: its text tells.
    return error if _text(error) == description.text else None


def _told(description: _Description) -> str:
    # torch's words, up to the name of the type.
    return (
        "Failed to create original exception type. Original exception on remote side "
        f"was {description.type}: {description.text}\n{description.traceback}"
    )


def _is_special(name: str) -> bool:
    return name.startswith("__") or hasattr(Exception, name)


def _text(error: BaseException) -> str:
    try:
        # Python itself adds to a group's message how many they are.
        return _cut(
            error.message if isinstance(error, BaseExceptionGroup) else str(error)
        )
    except BaseException as broken:  # noqa: BLE001 - its own __str__ may raise anything
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        told = traceback.TracebackException.from_exception(error)
        told.__notes__ = None  # they travel separately
        return _cut("".join(told.format()))
    except BaseException as broken:  # noqa: BLE001 - the same __str__, and attributes
        return f"<no traceback: making it raised {type(broken).__name__}>"


def _cut(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def _is_plain(value: Any) -> bool:
    """Whether a value consists of scalars, texts and containers, and is not large."""
    room = _LONGEST
    rest = [(value, 0)]
    while rest:
        item, depth = rest.pop()
        kind = type(item)
        room -= 1
        if kind in (str, bytes):
            room -= len(item)
        elif kind in (tuple, list, dict):
            if len(item) > room or depth == _DEEPEST:
                return False
            inner = chain(item, item.values()) if kind is dict else item
            rest += ((part, depth + 1) for part in inner)
        elif kind not in _SCALARS:
            return False
        if room < 0:
            return False
    return True
