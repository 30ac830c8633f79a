"""An exception arrives as what it was, or tells what it was; nothing else is made."""

import asyncio
import errno
import functools
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.rpc.base.errors import ProtocolError, RemoteError, RpcTimeout, WorkerLost
from jdist.rpc.codec import Codec
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import describe, rebuild
from tests.rpc import nameable
from tests.rpc.carriers import by_wire

TABLE = FunctionTable(allow=["tests"])


def _raised(error):
    """The exception with a traceback, as a called function raises it."""

    def called():
        raise error

    return _raised_by(called)


def _raised_by(call):
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - of any kind: that is the point
        return error
    raise AssertionError("nothing was raised")


def _crossed(error, worker="worker1", functions=TABLE):
    """Described at the callee, sent through bytes, rebuilt at the caller."""
    codec = Codec(FunctionTable())
    return rebuild(
        codec.decode(*by_wire(*codec.encode(describe(error, worker)))), functions
    )


SAME = [
    ValueError("Expected error"),
    ValueError(),
    ValueError("two", 2),
    TypeError("takes 1 argument"),
    KeyError("w"),
    KeyError(np.int64(3)),
    KeyError(("a", 1)),
    IndexError("x"),
    ZeroDivisionError("division by zero"),
    AssertionError(),
    StopIteration(3),
    RecursionError("deep"),
    MemoryError("x"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    FileNotFoundError(errno.ENOENT, "No such file", "a/b"),
    OSError(errno.EXDEV, "Cross-device link", "a", None, "b"),
    OSError(errno.EIO, "I/O"),
    OSError("just text"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError("late"),
    np.linalg.LinAlgError("Singular matrix"),
    np.exceptions.AxisError("axis 3"),
    jax.errors.JaxRuntimeError("INTERNAL: x"),
    RpcTimeout("RPC ran for more than set timeout"),
    WorkerLost("w2", "rpc_sync(f)", "its connection closed"),
    nameable.WithState("state"),
    nameable.FrozenError(3),
    ValueError("odd text \ud800 \0 🎂"),
    ValueError({"a": [1, (2.5, None, b"x")]}),
]


@pytest.mark.parametrize("error", SAME, ids=lambda error: type(error).__name__)
def test_exceptions_of_known_types(error):
    """Type, arguments and text are those of the original."""
    got = _crossed(_raised(error))
    assert type(got) is type(error)
    assert got.args == error.args
    assert str(got) == str(error)


def test_a_text_of_several_lines():
    """Newlines and quotes come through unescaped."""
    text = "First line of error \n next line of error \n last 'line' of \"error\""
    assert str(_crossed(_raised(ValueError(text)))) == text


def test_what_an_operating_system_error_carries():
    """The parts that are not in its arguments."""
    with pytest.raises(FileNotFoundError, match="absent") as caught:
        pathlib.Path("/absent/file").read_text()
    got = _crossed(caught.value)
    assert (got.errno, got.filename) == (errno.ENOENT, "/absent/file")
    assert str(got) == str(caught.value)


def test_attributes_that_are_plain():
    """Numbers and texts set on the exception come along; an open file stays behind."""
    error = nameable.WithState("s")
    error.code, error.note_to_self = 7, {"k": [1, "x"]}
    with open(__file__) as file:
        error.open_file = file
        got = _crossed(_raised(error))
    assert (got.code, got.note_to_self) == (7, {"k": [1, "x"]})
    assert got.open_file is None


# --- what is told with it ---


def _called_function():
    raise ValueError("deep inside")


def _caused():
    try:
        _called_function()
    except ValueError as error:
        raise KeyError("outside") from error


def test_the_traceback_and_the_worker():
    """As attributes for programs, and as a note for whoever reads the traceback."""
    with pytest.raises(KeyError, match="outside") as caught:
        _caused()
    caught.value.add_note("a note of the function")
    got = _crossed(caught.value, "trainer-3")
    assert got.remote_worker == "trainer-3"
    for part in ("_caused", "_called_function", "deep inside", "direct cause"):
        assert part in got.remote_traceback
    first, second = got.__notes__
    assert first == "a note of the function"
    assert second == f"Raised on worker 'trainer-3':\n{got.remote_traceback}"
    assert first not in got.remote_traceback
    shown = "".join(traceback.format_exception(_raised(got)))
    assert shown.count("a note of the function") == 1
    assert shown.count("in _called_function") == 1


def test_an_exception_that_passes_through():
    """Nested calls: the attributes name the origin, the notes every hop in order."""
    origin = _crossed(_raised(ValueError("x")), "worker2")
    got = _crossed(_raised(origin), "worker1")
    assert type(got) is ValueError
    assert got.remote_worker == "worker2"
    starts = [note.splitlines()[0] for note in got.__notes__]
    assert starts == ["Raised on worker 'worker2':", "Passed on by worker 'worker1':"]


def test_a_type_that_only_the_worker_between_allows():
    """Told in words at the last hop, which still knows where it began."""
    origin = _crossed(_raised(nameable.WithState("s")), "worker2")
    got = _crossed(_raised(origin), "worker1", FunctionTable())
    assert type(got) is RemoteError
    assert got.remote_worker == "worker2"
    assert got.remote_traceback == origin.remote_traceback
    assert "Passed on by worker 'worker1'" in got.__notes__[-1]


def test_a_constructor_that_makes_something_else():
    """Python makes a FileNotFoundError of this OSError: not what was described."""
    description = describe(OSError(errno.EIO, "I/O"), "w")
    got = rebuild({**description, "args": (errno.ENOENT, "I/O")}, TABLE)
    assert type(got) is RemoteError


def test_notes_that_are_no_texts():
    """Nothing keeps a program from putting anything into its notes."""
    error = ValueError("x")
    error.__notes__ = ["good", 3, None]
    assert _crossed(error, "").__notes__ == ["good"]
    error.__notes__ = "a text"
    assert _crossed(error, "").__notes__ == list("a text")


# --- what cannot be rebuilt ---


def _local_type():
    class LocalError(Exception):
        pass

    return LocalError("hidden")


UNBUILDABLE = {
    "two arguments": (nameable.TwoArguments(3, "told"), "nameable:TwoArguments: told"),
    "longer each time": (nameable.Embellished("x"), "Embellished: embellished: x"),
    "local class": (_local_type(), "<locals>.LocalError: hidden"),
    "odd arguments": (ValueError(object()), "builtins:ValueError: <object object"),
    "array": (ValueError(np.arange(3)), r"builtins:ValueError: \[0 1 2\]"),
    "interrupt": (KeyboardInterrupt("stop"), "builtins:KeyboardInterrupt: stop"),
    "exit": (SystemExit(3), "builtins:SystemExit: 3"),
    "generator": (GeneratorExit(), "builtins:GeneratorExit: "),
    "cancelled": (asyncio.CancelledError("c"), "CancelledError: c"),
    "own base": (nameable.Halt("h"), "nameable:Halt: h"),
    "not allowed": (asyncio.QueueFull("full"), "asyncio.queues:QueueFull: full"),
    "huge": (ValueError(list(range(200_000))), r"\[0, 1, 2.*characters.*199999\]"),
    "deep": (ValueError(functools.reduce(lambda x, _: [x], range(50), 0)), r"\[\[\["),
}


@pytest.mark.parametrize("name", UNBUILDABLE)
def test_remote_errors(name):
    """The original is told in torch's words; its traceback is still there."""
    error, told = UNBUILDABLE[name]
    got = _crossed(_raised(error))
    assert type(got) is RemoteError
    assert isinstance(got, RuntimeError)
    with pytest.raises(
        RemoteError, match=rf"(?s)Original exception on remote side was.*{told}"
    ):
        raise got
    assert got.remote_worker == "worker1"
    assert "test_remote_exception.py" in got.remote_traceback


def test_an_exception_that_cannot_say_its_text():
    """Even then it arrives, with its type and its traceback."""
    got = _crossed(_raised(nameable.Unprintable(3)))
    assert type(got) is nameable.Unprintable
    assert got.args == (3,)
    assert "test_remote_exception.py" in got.remote_traceback


def test_a_caller_with_a_shorter_list():
    """The type is the caller's to allow: another's exceptions are told in words."""
    error = nameable.WithState("s")
    got = _crossed(_raised(error), functions=FunctionTable())
    assert type(got) is RemoteError
    assert "tests.rpc.nameable:WithState: s" in str(got)


def test_jax_errors():
    """What tracing and running raise arrive as their own types, all of them."""

    def concretized(x):
        return bool(x)

    def mismatched():
        return jnp.ones((2, 3)) @ jnp.ones((2, 3))

    for call in (
        lambda: jax.jit(concretized)(1.0),
        lambda: jax.jit(lambda x: np.asarray(x))(1.0),
        lambda: jax.jit(lambda x: [1, 2][x])(1),
        mismatched,
        lambda: jnp.float32(1) + jnp.int32(1),
        lambda: jax.grad(lambda x: x)(jnp.ones(3)),
    ):
        error = _raised_by(call)
        got = _crossed(error)
        assert type(got) is type(error)
        assert str(got) == str(error)


def test_long_texts_are_cut():
    """A message of megabytes does not travel; both of its ends do."""
    text = "begin " + "x" * 10**6 + " end"
    got = _crossed(_raised(ValueError(text)))
    assert type(got) is RemoteError
    assert len(str(got)) < 500_000
    assert "begin xxx" in str(got)
    assert "xxx end" in str(got)
    assert "characters ..." in str(got)


# --- groups ---


def _failing_tasks():
    """Exceptions as several tasks raise them, each with a traceback of its own."""
    missing = _raised(KeyError("w"))
    missing.add_note("a note of the task")
    inner = ExceptionGroup("inner", [_raised(TypeError("5 for 6")), missing])
    return ExceptionGroup("tasks", [_raised(ValueError(7)), _raised(inner)])


def test_a_group_is_handled_by_what_it_contains():
    """As one that was raised here, by `except*`, also of a group within it."""
    caught = []
    try:
        raise _crossed(_raised(_failing_tasks()), "trainer-3")
    except* KeyError as group:
        caught += group.exceptions
    except* (ValueError, TypeError) as group:
        caught += group.exceptions
    assert [*map(repr, caught)] == [
        "KeyError('w')",
        "ValueError(7)",
        "TypeError('5 for 6')",
    ]
    for error in caught:
        assert error.remote_worker == "trainer-3"
        assert "in _raised_by" in error.remote_traceback
        assert error.__notes__[-1].startswith("Raised on worker 'trainer-3':\n")
    assert caught[0].__notes__[0] == "a note of the task"


def test_what_is_told_with_a_group():
    group = _raised(_failing_tasks())
    got = _crossed(group, "trainer-3")
    assert type(got) is ExceptionGroup
    assert str(got) == "tasks (3 sub-exceptions)"
    assert got.remote_worker == "trainer-3"
    assert "TypeError: 5 for 6" in got.remote_traceback
    assert [note.splitlines()[0] for note in got.__notes__] == [
        "Raised on worker 'trainer-3':"
    ]
    passed = _crossed(_raised(got), "worker1")
    key = passed.exceptions[2]
    assert (passed.remote_worker, key.remote_worker) == ("trainer-3",) * 2
    starts = [note.splitlines()[0] for note in key.__notes__]
    assert starts[1:] == [
        "Raised on worker 'trainer-3':",
        "Passed on by worker 'worker1':",
    ]
    assert not hasattr(_crossed(group, "").exceptions[0], "__notes__")


def test_groups_of_other_classes():
    """Whatever they hide; each exception in them is of its own type, where allowed."""
    inner = [nameable.WithState("s"), nameable.TwoArguments(3, "told")]
    got = _crossed(_raised(nameable.Failures(inner, 11)))
    assert (type(got), str(got)) == (ExceptionGroup, "code 11 (2 sub-exceptions)")
    assert [*map(type, got.exceptions)] == [nameable.WithState, RemoteError]


@pytest.mark.parametrize(
    "halt", [KeyboardInterrupt("k"), SystemExit(3), nameable.Halt("h")]
)
def test_a_group_with_an_interrupt(halt):
    """No key was pressed on this side: what it holds besides arrives as it was."""
    got = _crossed(_raised(BaseExceptionGroup("both", [ValueError(5), halt])))
    assert (type(got), str(got)) == (ExceptionGroup, "both (2 sub-exceptions)")
    value, told = got.exceptions
    assert repr(value) == "ValueError(5)"
    assert type(told) is RemoteError
    assert f"{type(halt).__name__}: {halt}" in str(told)


def test_groups_that_are_too_large():
    """Those at the end stay behind, and the group says so; a small one is complete."""
    left = "More exceptions stayed behind: they are too many."
    many = ExceptionGroup("many", [ValueError(n) for n in range(3000)])
    *kept, rest = _crossed(_raised(many)).exceptions
    assert [error.args for error in kept] == [(n,) for n in range(1000)]
    assert str(rest) == left
    long = ExceptionGroup("long", [ValueError("x" * 90_000) for _ in range(50)])
    *kept, rest = _crossed(long).exceptions
    assert str(rest) == left
    assert 3 <= len(kept) <= 11
    assert {str(error) for error in kept} == {"x" * 90_000}
    # What is shared is described at each place, and doubled at each level.
    doubled = functools.reduce(
        lambda e, _: ExceptionGroup("g", [e, e]), range(11), ValueError(7)
    )
    assert len(_crossed(doubled).exceptions) == 1001


def test_a_group_that_is_deep():
    deep = functools.reduce(
        lambda e, _: ExceptionGroup("g", [e]), range(50), ValueError(7)
    )
    assert [*map(repr, _crossed(deep).exceptions)] == ["ValueError(7)"]


# --- descriptions that nobody makes ---

GOOD = describe(ValueError("x"), "w")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", 3), ("text", None), ("args", 3), ("args", "x"), ("state", []),
        ("state", {3: 1}), ("state", {"__class__": 1}), ("state", {"__cause__": 1}),
        ("state", {"args": 1}), ("state", {"with_traceback": 1}),
        ("state", {"add_note": None}), ("notes", "abc"), ("notes", [1]),
        ("traceback", b""), ("worker", None), ("more", 1), ("type", None),
        ("exceptions", 3), ("exceptions", "ab"), ("exceptions", [{"type": "x"}]),
    ],
)  # fmt: skip
def test_malformed_descriptions(field, value):
    """Refused before anything is made of them."""
    with pytest.raises(ProtocolError, match="A remote exception's"):
        rebuild({**GOOD, field: value}, TABLE)


def test_an_array_is_no_description():
    """An array passes for a mapping until it is asked for a name."""
    with pytest.raises(ProtocolError, match="description is malformed"):
        rebuild(np.ones(3), TABLE)


GROUP = describe(ExceptionGroup("x", [ValueError("y")]), "w")


def test_malformed_groups():
    """Refused like others."""
    for inner in ([], [GOOD] * 1002):
        with pytest.raises(ProtocolError, match="no exceptions, or too many"):
            rebuild({**GROUP, "exceptions": inner}, TABLE)
    with pytest.raises(ProtocolError, match=r"is malformed: .*exceptions"):
        rebuild({**GROUP, "exceptions": [GOOD, 3]}, TABLE)
    with pytest.raises(ProtocolError, match="has a group in it"):
        rebuild({**GROUP, "exceptions": [GOOD, GROUP]}, TABLE)
    # Methods of a group that `except*` calls stay its own.
    for name in ("derive", "split", "subgroup", "exceptions"):
        got = rebuild({**GROUP, "state": {name: 3}}, TABLE)
        assert callable(getattr(got, name)) or name == "exceptions"
        assert len(got.exceptions) == 1


def test_a_group_that_is_none():
    """A type that is no group with exceptions, and a group without."""
    got = rebuild({**GOOD, "exceptions": [GOOD]}, TABLE)
    assert (type(got), repr(got.exceptions[0])) == (ExceptionGroup, "ValueError('x')")
    for args in (None, ("x", None), ("x", []), ("x",), ()):
        got = rebuild({**GROUP, "exceptions": None, "args": args}, TABLE)
        assert type(got) is RemoteError


@pytest.mark.parametrize("value", [None, 3, [], {}, {"type": "builtins:ValueError"}])
def test_no_descriptions(value):
    """Anything that is no description at all, too."""
    with pytest.raises(ProtocolError, match="description is malformed"):
        rebuild(value, TABLE)


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "builtins:print", "builtins:int", "builtins:exit",
     "builtins:SystemExit", "tests.rpc.nameable:Counter", "tests.rpc.nameable:add",
     "tests.rpc.nameable:imported_function", "tests.rpc.nameable:Halt", "", ":", "x"],
)  # fmt: skip
def test_only_exceptions_are_made(name):
    """A description that names a function or another class calls neither."""
    nameable.CALLS.clear()
    got = rebuild({**GOOD, "type": name, "args": ("true",)}, TABLE)
    assert type(got) is RemoteError
    assert nameable.CALLS == []


def test_a_description_in_a_value():
    """A malformed one among the values of a call is a malformed message."""
    codec = Codec(TABLE)
    tree, leaves = codec.encode(ValueError("x"))
    tree[1][1] = "other"
    with pytest.raises(ProtocolError, match="description is malformed"):
        codec.decode(tree, leaves)
