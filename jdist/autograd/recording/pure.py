"""Pure functions of recorded values: compiled once, run forward, and recorded.

A function is traced once for all that it reads, and a lambda in a loop in each
iteration; either is compiled once. Each call makes one node. An argument of the
function is one of three kinds:

- arrays of recorded values and variables: differentiated;
- other arrays, and Python's floating numbers: inputs without a derivative, so that
  another value needs no other compilation;
- all else (integers, booleans, strings, shapes, ...): part of the compiled function.

A called function with recorded arguments is taken as pure unless it is marked by
`eager`. While a pure function is traced, what it must not do is refused: calls, the
values of variables that are no arguments, and changes of Flax NNX modules. Such a
module is copied for each call. A change by the call (a dropout layer's count,
batch statistics) is lost with the copy, unless the function returns it.
"""

import contextlib
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsInt, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jdist._compat import called_outside_mesh, is_traced, part_of, without_unread
from jdist._errors import type_error
from jdist._flax import module_leaves
from jdist._lru_cache import LRUCache
from jdist._tree import PyTree, is_inexact, type_name
from jdist.autograd.recording.node import Edge, SegmentNode, next_order
from jdist.rpc.extension import is_asynchronous
from jdist.segment import Segment
from jdist.segment.internal import (
    Contents,
    ForwardPlan,
    FunctionCache,
    contents_of,
    forward_arrays,
    is_fixed,
    pure_segment,
)

F = TypeVar("F", bound=Callable[..., object])
PureCallable = Callable[..., PyTree]

_MARK = "__jdist_autograd_eager__"

# The public call that is tracing a pure function in this thread of control.
_tracing: ContextVar[str | None] = ContextVar("jdist.autograd.tracing", default=None)

_ARRAYS = (jax.Array, np.ndarray, np.generic)
NUMBERS: tuple[type, ...] = (float, complex)
"""Python's numbers that are inputs, unless said otherwise."""

_STATIC = (bool, int, str, bytes, range, np.dtype, type(...))
_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, type(jax.jit(abs)), jnp.ufunc
)  # fmt: skip


class Recordable:
    """A value with a history: `Recorded` and `Variable`."""

    __slots__ = ()

    def flat(
        self,
    ) -> tuple["DifferentiatedTree", Sequence[jax.Array], Sequence[Edge | None]]:
        """Returns its kind as an argument, its arrays, and the edge of each array."""
        raise NotImplementedError


class Constant:
    """An argument that is part of the compiled function, compared by identity."""

    __slots__ = ()


@called_outside_mesh
def call(
    fn: PureCallable,
    leaves: Sequence[PyTree],
    structure: jax.tree_util.PyTreeDef,
    numbers: tuple[type, ...],
    recorded: Callable[[jax.Array, Edge], Recordable],
) -> PyTree:
    """Runs `fn(*args, **kwargs)`, compiled, and records it.

    Args:
      fn: A pure function.
      leaves: Leaves of `(args, kwargs)`, recorded values and variables among them.
      structure: Tree structure of `(args, kwargs)`.
      numbers: Types of Python's numbers that are inputs.
      recorded: Makes a recorded value of an array and its edge.

    Returns:
      What the function returned, with recorded values in place of the arrays through
      which a cotangent can flow back.

    Raises:
      TypeError: The function or an argument cannot be compiled.
      Exception: Whatever the function raises.
    """
    arrays: list[ArrayLike] = []
    edges: list[Edge | None] = []
    kinds: list[TakenLeaf] = []
    kind: TakenLeaf
    for leaf in leaves:
        if isinstance(leaf, Recordable):
            kind, found, to = leaf.flat()
            arrays += found
            edges += to
        else:
            kind = _take(leaf, arrays, edges, numbers)
        kinds.append(kind)
    # A call within a traced function would be recorded once, at compilation.
    if _tracing.get() is not None:
        refuse_in_pure("a call of {} with recorded values", _name(fn))
    # By identity: some functions of JAX compute a hash, in Python, from their parts.
    function = _LIBRARY.get(id(fn))
    if function is None or function.fn is not fn:
        function = _function_of(fn)
    # As a plain tuple, which equals the spec and is made in a fifth of its time.
    known, given = (structure, tuple(kinds)), tuple(arrays)
    segment = function.segments.get(known) or function.segment(ArgumentSpec(*known))
    outputs, residuals = forward_arrays(segment, given)
    has_history = tuple([edge is not None for edge in edges])
    made, live = _made(residuals.plan, has_history)
    if True not in live:
        return outputs
    inputs, order = tuple(edges), next_order()
    node = SegmentNode(function.name, inputs, order, segment, residuals, made)
    pairs = enumerate(zip(made.flatten_up_to(outputs), live, strict=True))
    return made.unflatten(
        [recorded(x, Edge(node, n)) if is_live else x for n, (x, is_live) in pairs]
    )


def _function_of(fn: PureCallable) -> "PureFunction":
    """Finds or makes the compiled function."""
    if isinstance(fn, _FUNCTIONS) and is_fixed(fn):
        # A function of a library cannot change, so its contents are not read.
        found = PureFunction(fn, contents_of(fn, "apply"))
        _LIBRARY.put(id(fn), found)
        return found
    _refuse_closure(fn)
    return _COMPILED.get(fn, (), lambda contents: PureFunction(fn, contents))


class PureFunction:
    """One function, compiled for each `ArgumentSpec` with which it is called.

    Args:
      fn: The function.
      contents: What it reads.

    Attributes:
      fn, contents: The arguments of these names.
      name: Its name, for nodes.
      segments: The function of the arrays alone, as two halves, by `ArgumentSpec`.
    """

    def __init__(self, fn: PureCallable, contents: Contents) -> None:
        self.fn = fn
        self.contents = contents
        self.name = _name(fn)
        # One function with the spec as a static argument would have JAX compare the
        # spec in each call.
        self.segments: LRUCache[tuple[Any, ...], Segment] = LRUCache(_SPECS)

    def segment(self, spec: "ArgumentSpec") -> Segment:
        """Makes and keeps the segment for this spec, if there is none."""
        return self.segments.get_or_make(
            spec, lambda: _segment(self.fn, self.contents.code, spec)
        )


def _segment(fn: PureCallable, code: Hashable, spec: "ArgumentSpec") -> Segment:
    name = _name(fn)

    def run(_: tuple[()], *arrays: jax.Array) -> PyTree:
        args, kwargs = spec.arguments(arrays)
        call = f"apply({name})"
        before = module_leaves((args, kwargs))
        with tracing(call):
            returned = fn(*args, **kwargs)
        if before:
            _refuse_lost_state(call, before, (args, kwargs), returned)
        return returned

    run.__name__ = name
    return pure_segment(run, "apply", (code, spec.case))


class ArgumentSpec(NamedTuple):
    """The arguments of a function without their arrays: a key of its compilation."""

    structure: jax.tree_util.PyTreeDef
    kinds: tuple["TakenLeaf", ...]

    @property
    def case(self) -> Hashable:
        """The spec with functions reduced to their code, which versions share."""
        kinds = [x.case if isinstance(x, _StaticArgument) else x for x in self.kinds]
        return self.structure, tuple(kinds)

    def arguments(self, arrays: Sequence[ArrayLike]) -> PyTree:
        """Builds `(args, kwargs)` from these arrays."""
        given = iter(arrays)
        return jax.tree.unflatten(
            self.structure, [kind.value(given) for kind in self.kinds]
        )


class DifferentiatedTree(NamedTuple):
    """A tree of arrays; `wanted` tells which have a derivative."""

    structure: jax.tree_util.PyTreeDef
    wanted: tuple[bool, ...]

    def value(self, given: Iterator[ArrayLike]) -> PyTree:
        """Builds the tree from the next arrays of an iterator."""
        arrays = [_given(given, wanted) for wanted in self.wanted]
        return jax.tree.unflatten(self.structure, arrays)


class _UndifferentiatedArray(NamedTuple):
    """An array without a derivative."""

    def value(self, given: Iterator[ArrayLike]) -> PyTree:
        return _given(given, wanted=False)


@dataclass(frozen=True, slots=True)
class _StaticArgument:
    """A value that is part of the compiled function; equal by its key.

    Attributes:
      held: The value.
      key: Its key; a new object where the value certainly equals no other.
      case: The part of its key that versions of the value share.
    """

    held: object = field(compare=False)
    key: Hashable
    case: Hashable = field(compare=False)

    def value(self, given: Iterator[ArrayLike]) -> PyTree:
        return self.held


TakenLeaf = DifferentiatedTree | _UndifferentiatedArray | _StaticArgument
"""How a function takes a leaf of its arguments."""

_PLAIN = _UndifferentiatedArray()
ONE = DifferentiatedTree(jax.tree.structure(0), (True,))
"""A single array with a derivative."""

_COMPILED: FunctionCache[PureFunction] = FunctionCache("apply", size=256)
_ARGUMENTS: "FunctionCache[_StaticFunction]" = FunctionCache("apply", size=256)

_LIBRARY: LRUCache[int, PureFunction] = LRUCache(1024)
"""Functions of libraries by their ids, which are theirs as long as they are here."""

_SPECS = 256
"""Number of argument specs of each function whose compiled segments are kept."""


def _given(given: Iterator[ArrayLike], wanted: bool) -> ArrayLike:
    array = next(given)
    if wanted or not is_inexact(array):
        return array
    # Neither its cotangent nor what only that would need is computed then.
    return jax.lax.stop_gradient(array)


def _take(
    leaf: PyTree,
    arrays: list[ArrayLike],
    edges: list[Edge | None],
    numbers: tuple[type, ...],
) -> "TakenLeaf":
    """Classifies a leaf without a history; appends it to `arrays` if it is one."""
    if isinstance(leaf, _ARRAYS) or type(leaf) in numbers:
        # Recorded values beside it would be baked into the program that JAX is tracing.
        if is_traced(leaf):
            rule = "must not be given traced arrays beside recorded values"
            remedy = "Inside jax.grad and jax.jit use autograd.remote_call."
            raise type_error("apply(*args)", rule, str(leaf), remedy)
        # A copy: the caller may write to it before the backward pass reads it.
        arrays.append(np.array(leaf) if type(leaf) is np.ndarray else leaf)
        edges.append(None)
        return _PLAIN
    if isinstance(leaf, Constant):
        return _StaticArgument(leaf, leaf, leaf)
    if isinstance(leaf, (*_FUNCTIONS, type, enum.Enum)):
        _refuse_closure(leaf)
        return _ARGUMENTS.get(
            leaf,
            (),
            lambda contents: _StaticFunction(leaf, object(), contents.code, contents),
        )
    key = _key(leaf)
    return _StaticArgument(leaf, key, key)


@dataclass(frozen=True, slots=True)
class _StaticFunction(_StaticArgument):
    """A function or class as part of the compiled function, until it changes.

    Attributes:
      contents: What it reads.
    """

    contents: Contents = field(compare=False)


def _key(leaf: object) -> Hashable:
    if isinstance(leaf, _STATIC):
        return type(leaf), leaf
    if isinstance(leaf, slice):
        return slice, _key_of_end(leaf.start), _key_of_end(leaf.stop), leaf.step
    rule = "must be made of arrays, numbers, strings, functions and pytrees of them"
    remedy = (
        "Register its class with jax.tree_util, or mark the function with "
        "@autograd.eager: then it runs as Python, with recorded values."
    )
    raise type_error("apply(*args)", rule, type_name(leaf), remedy)


def _key_of_end(end: SupportsInt | None) -> int | None:
    return None if end is None else int(end)


def _refuse_closure(fn: Any) -> None:
    """Refuses recorded values in a closure, which would get no gradient."""
    cells = getattr(fn, "__closure__", None) or ()
    for cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
        if isinstance(value, Recordable):
            rule = "must not refer to recorded values or variables"
            remedy = "Pass them as arguments: only these are differentiated."
            raise type_error("apply(fn)", rule, _name(fn), remedy)


@functools.lru_cache(maxsize=1024)
def _made(
    plan: ForwardPlan, recorded: tuple[bool, ...]
) -> tuple[jax.tree_util.PyTreeDef, tuple[bool, ...]]:
    """Returns the structure of the outputs, and which of them have a history."""
    shapes, structure = jax.tree.flatten(plan.outputs)
    floating = [is_inexact(shape) for shape in shapes]
    # An output that depends on recorded inputs only behind `stop_gradient`, a
    # comparison or a rounding has no history: no cotangent flows.
    linear, _ = plan.linear_part([True] * sum(floating))
    pairs = zip(recorded, plan.trained, strict=True)
    wanted = [is_recorded for is_recorded, is_trained in pairs if is_trained]
    results = [
        x
        for x, is_wanted in zip(linear.jaxpr.outvars, wanted, strict=True)
        if is_wanted
    ]
    given = linear.jaxpr.invars
    part = part_of(linear, given, results, effects=False)
    _, read = without_unread(part, optional=len(given))
    # The cotangents come last, after the residuals.
    reached = iter(read[len(given) - sum(floating) :])
    return structure, tuple([is_floating and next(reached) for is_floating in floating])


def _name(fn: PureCallable) -> str:
    inner = getattr(fn, "func", fn)
    return getattr(inner, "__name__", None) or type(inner).__name__


# --- pure and eager functions ---


def eager(fn: F) -> F:
    """Marks a function that runs as Python when it is called with recorded values.

    Without the mark a function so called by another worker is taken as pure: it
    receives arrays and is compiled. One that makes calls itself, holds references, or
    uses variables of its own worker is not: marked, it receives recorded values, and
    records what it does with them by operators and `autograd.apply`.

    Methods, classes and functions marked by `rpc.async_execution` run as Python anyway.

    Args:
      fn: A Python function. It may stand on either side of `staticmethod` and
        `classmethod`.

    Raises:
      TypeError: `fn` is not a Python function.

    Example:
      >>> @eager
      ... def through(x, next_worker):
      ...     return rpc.rpc_sync(next_worker, double, args=(x,))
    """
    inner = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
    try:
        # On the function itself: a wrapper would have another name, by which it
        # travels.
        setattr(inner, _MARK, True)
    except (AttributeError, TypeError):
        raise type_error("eager(fn)", "must be a Python function", fn) from None
    return fn


def is_pure(function: Callable[..., object]) -> bool:
    """Whether a call of `function` with recorded values is compiled."""
    # The mark is on the function inside.
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type | types.MethodType):
        return False
    return not getattr(function, _MARK, False) and not is_asynchronous(function)


@contextlib.contextmanager
def tracing(call: str) -> Iterator[None]:
    """Marks the block as the trace of a pure function by `call`."""
    token = _tracing.set(call)
    try:
        yield
    finally:
        _tracing.reset(token)


KEEPS_STATE = (
    "`autograd.TrainableModule(module)` keeps its state from call to call. By hand: "
    "`graph, params, rest = nnx.split(module, nnx.Param, ...)`. Make the "
    "variable of `params`, give `rest` to the function as an input, and have it return "
    "the new one as an output: `module = nnx.merge(graph, params, rest)`, and "
    "`nnx.state(module, nnx.Not(nnx.Param))`."
)
"""What to do with a Flax module whose state changes."""


def _refuse_lost_state(
    call: str,
    before: Sequence[tuple[str, object]],
    arguments: PyTree,
    returned: PyTree,
) -> None:
    """Refuses changes of modules in `arguments` that `returned` does not contain.

    Raises:
      TypeError: The function has changed a module, and does not return the change.
    """
    # By identity: a module writes a new array where it changes its state.
    kept = {id(leaf) for _, leaf in before} | set(map(id, jax.tree.leaves(returned)))
    after = module_leaves(arguments)
    lost = sorted(path for path, leaf in after if id(leaf) not in kept)
    if lost:
        rule = "must not change a module that it is given: the change would be lost"
        raise type_error(call, rule, ", ".join(lost), KEEPS_STATE)


def refuse_in_pure(what: str, *names: object) -> None:
    """Refuses a side effect in a pure function: it would happen once, at compilation.

    Args:
      what: What is refused, with `{}` for each of the names.
      *names: Formatted into `what`, in the error only.

    Raises:
      TypeError: A pure function is being traced.
    """
    call = _tracing.get()
    if call is not None:
        raise type_error(
            call,
            "must be a pure function of its arguments: it is compiled",
            what.format(*names),
            "Pass recorded values and variables as arguments, or mark the function "
            "with @autograd.eager: then it runs as Python, with recorded values.",
        )
