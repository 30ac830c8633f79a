"""Detection of random numbers in a loss that depend on how the batch is split.

A loss that makes one mask for the whole batch draws other numbers for half of it. So a
right program that splits the batch has another gradient, and no judge can say whether
it is the right one. Where each example has its key in the batch, all ways draw alike.

What a loss draws is read off its program, traced for the whole batch and for one
example. A draw is *split-dependent* if

- it makes more numbers from each key for more examples: one key serves them all; or
- it has more keys for more examples, and they do not come from the batch: they come
  from an example's place, which a split changes; or
- its key comes from the batch, and it has as many for one example as for several.

Draws of parameters' shapes, as in noise on weights, are the same in every split, and so
are those whose keys are leaves of the batch, or made of such leaves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from jdist._compat import loop_counts
from jdist._errors import requirement
from jdist._tree import PyTree

REMEDY = (
    "Give each example a key of its own in the batch: verify.keyed(loss_fn), "
    "docs/verify.md, Random numbers"
)

# The primitives that make random numbers or further keys; the first operand is the key.
_DRAWING = frozenset({
    "random_bits", "random_gamma", "random_split", "rng_bit_generator", "threefry2x32",
})  # fmt: skip


class Draw(NamedTuple):
    """One equation that draws.

    Attributes:
      primitive: Name of the primitive.
      keys: Shape of the keys, after the lengths of the enclosing loops.
      made: Shape of the result for each key.
      from_batch: Whether the keys depend on the batch.
    """

    primitive: str
    keys: tuple[int, ...]
    made: tuple[int, ...]
    from_batch: bool


def keyed(loss_fn: Callable[..., Any]) -> Callable[[PyTree, PyTree], jax.Array]:
    """A loss that draws each example's numbers from that example's own key.

    The numbers then do not depend on how the batch is split, so that gradients with
    dropout or noise can be judged, or compared between any two trainers.

    Args:
      loss_fn: `loss_fn(params, batch, key)`: for a batch of one example its loss, shape
        `(1,)` or `()`.

    Returns:
      `losses(params, (batch, keys))`, shape `(examples,)`; `keys` has one PRNG key for
      each example, such as `jax.random.split(key, examples)`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import verify
      >>> def loss(w, x, key):                                   # dropout
      ...     return (jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ w) ** 2
      >>> losses, x = keyed(loss), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> batch = x, jax.random.split(jax.random.key(0), 3)
      >>> def in_two(w, batch):
      ...     f = jax.value_and_grad(lambda w, b: losses(w, b).sum())
      ...     first, second = (jax.tree.map(lambda x: x[s], batch) for s in
      ...                      (slice(0, 1), slice(1, 3)))
      ...     return jax.tree.map(lambda a, b: (a + b) / 3, f(w, first), f(w, second))
      >>> w = jnp.array([0.3, 0.4])
      >>> verify.gradients(losses, w, batch, {"in two": in_two}).ok
      True
    """

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        def one(row: PyTree, key: jax.Array) -> jax.Array:
            alone = jax.tree.map(lambda x: x[None], row)
            return jnp.reshape(loss_fn(params, alone, key), ())

        return jax.vmap(one)(*batch)

    return losses


def check_loss(call: str, loss_fn: Callable[..., Any], *arguments: PyTree) -> None:
    """Raises if a loss takes more arguments than it is given, such as a key.

    Raises:
      TypeError: It cannot be called with these arguments.
    """
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # Some functions written in C have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        rule = "must be a function of the parameters and the batch"
        names = list(signature.parameters)
        got = f"a function of ({', '.join(names)})"
        more = len(names) > len(arguments)
        remedy = "For a loss_fn(params, batch, key) pass verify.keyed(loss_fn)."
        call = f"{call}(loss_fn=...)"
        raise TypeError(requirement(call, rule, got, remedy * more)) from error


def split_dependent(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> str:
    """The reason why a split of the batch draws other numbers; empty if none does.

    Args:
      loss_fn: `loss_fn(params, batch)`.
      params: Pytree.
      batch: Pytree, each leaf `(examples, ...)` if the losses are one per example.
    """
    whole = _draws(loss_fn, params, batch)
    if not whole:
        return ""
    # The trace for one example shows which draws grow with their number.
    row = jax.tree.map(lambda x: x[:1] if jnp.ndim(x) else x, batch)
    try:
        alone = _draws(loss_fn, params, row)
    except (TypeError, ValueError):
        alone = []  # A loss for this number of examples only.
    # Where one example draws by other equations, they cannot be paired.
    singles = alone if len(alone) == len(whole) else [None] * len(whole)
    several = any(jnp.shape(x)[:1] > (1,) for x in jax.tree.leaves(batch))
    for draw, single in zip(whole, singles, strict=True):
        if _depends(draw, single, several):
            return (
                f"the loss draws random numbers ({draw.primitive}) whose keys are not "
                f"one for each example: a split of the batch draws others. {REMEDY}"
            )
    return ""


def draws_of_its_own(candidate: Callable[..., Any], *arguments: PyTree) -> bool | None:
    """Whether a candidate draws random numbers; None if that is unknown.

    A jitted function is traced. So is a function that refers only to functions,
    constants and containers, whose contents are restored. Other callables are not
    traced: they may have side effects, or keep tracers for their next call.
    """
    found, containers = None, _containers_of(candidate)
    if isinstance(candidate, jax.stages.Wrapped):
        found = bool(_traced(candidate.trace(*arguments)))
    elif containers is not None:
        # A function that branches on values or converts them cannot be traced.
        with _restored(containers), contextlib.suppress(Exception):
            found = bool(_traced(jax.jit(candidate).trace(*arguments)))
    inner = getattr(candidate, "__wrapped__", None)
    if found is None and inner is not None:
        return draws_of_its_own(inner, *arguments)
    return found


def _traced(program: jax.stages.Traced) -> list[Draw]:
    jaxpr = program.jaxpr.jaxpr
    return _walk(jaxpr, [True] * len(jaxpr.invars), ())[0]


def _containers_of(candidate: object) -> list[Any] | None:
    """The lists, dicts and sets that a function may change; None if others as well."""
    # By id, with the object kept alive: ids are reused.
    reached: dict[int, Any] = {}
    rest = [candidate]
    while rest:
        value = rest.pop()
        if id(value) in reached or isinstance(value, _FIXED):
            continue
        reached[id(value)] = value
        inside = _inside_of(value)
        if inside is None:
            return None
        rest += inside
    return [x for x in reached.values() if isinstance(x, list | dict | set)]


def _inside_of(value: Any) -> list[object] | None:
    """The objects that a value refers to; None if it may hold others."""
    inside: list[object] | None = None
    if isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    # The exact type: a subclass may have attributes of its own.
    elif type(value) in _MAPPINGS:
        inside = list(value.values())
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif dataclasses.is_dataclass(value) and _is_frozen(type(value)):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    # A function that assigns to outer names may keep tracers in them.
    elif isinstance(value, types.FunctionType) and not _assigns(value.__code__):
        inside = []
        for cell in value.__closure__ or ():
            # A name that is not bound yet, or no longer, has an empty cell.
            with contextlib.suppress(ValueError):
                inside.append(cell.cell_contents)
        inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        known = value.__globals__
        # These packages handle tracers in their own globals.
        if known.get("__name__", "").partition(".")[0] not in _PACKAGES:
            # `co_names` has attributes too: a superset of the globals that are read.
            names = {name for code in _codes(value.__code__) for name in code.co_names}
            inside += [known[name] for name in names if name in known]
    return inside


_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "jdist")


@contextlib.contextmanager
def _restored(containers: list[Any]) -> Iterator[None]:
    """Restores the contents of containers when the block ends."""
    before = [(each, each.copy(), _identities(each)) for each in containers]
    try:
        yield
    finally:
        for each, kept, identities in before:
            # Unchanged containers are not touched: other threads may read them.
            if _identities(each) == identities:
                continue
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(kept)


def _identities(container: Collection[object]) -> list[int]:
    # By id, because arrays have no single truth value to compare by.
    held = list(container)
    if isinstance(container, dict):
        held += container.values()
    return list(map(id, held))


_MAPPINGS = (dict, collections.OrderedDict, types.MappingProxyType)

# NumPy arrays cannot hold tracers, and jitted functions are traced by themselves.
_FIXED = (
    bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, np.dtype,
    jax.Array, jax.stages.Wrapped, jax.custom_jvp, jax.custom_vjp, jnp.ufunc, type,
    jax.tree_util.PyTreeDef, types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip


def _is_frozen(kind: Any) -> bool:
    return bool(kind.__dataclass_params__.frozen)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of the functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _assigns(code: types.CodeType) -> bool:
    """Whether code, or a function inside it, assigns to names outside of all of it."""
    outside = ("STORE_GLOBAL", "DELETE_GLOBAL")
    return any(
        step.opname in outside
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for each in _codes(code)
        for step in dis.get_instructions(each)
    )


def draws_nothing(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> bool:
    """Whether a loss draws no random numbers."""
    return not _draws(loss_fn, params, batch)


def made_of_batch(fn: Callable[..., Any], params: PyTree, batch: PyTree) -> list[bool]:
    """Which leaves of `fn(params, batch)` depend on the batch's leaves, in order."""
    program = jax.jit(fn).trace(params, batch).jaxpr.jaxpr
    given = [False] * len(jax.tree.leaves(params))
    given += [True] * len(jax.tree.leaves(batch))
    return _walk(program, given, ())[1]


def _depends(draw: Draw, single: Draw | None, several: bool) -> bool:
    if single is None:
        return not draw.from_batch
    # One example's key serves all of them: a split takes another example's.
    if several and draw.from_batch and draw.keys == single.keys:
        return True
    # Split keys count where numbers are drawn from them: many are never used.
    more_keys = draw.keys != single.keys and draw.primitive != "random_split"
    return draw.made != single.made or (more_keys and not draw.from_batch)


def _draws(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> list[Draw]:
    traced = jax.jit(loss_fn).trace(params, batch).jaxpr
    given = [False] * len(jax.tree.leaves(params))
    # A number or a key beside the examples is the same in every split.
    given += [jnp.ndim(x) > 0 for x in jax.tree.leaves(batch)]
    return _walk(traced.jaxpr, given, ())[0]


def _walk(
    jaxpr: Jaxpr, given: Sequence[bool], loops: tuple[int, ...]
) -> tuple[list[Draw], list[bool]]:
    """The draws of a program, and which of its results depend on the batch.

    Args:
      jaxpr: The program.
      given: Which of its arguments do.
      loops: The lengths of the loops that it stands in.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))

    def depends(atom: Var | Literal) -> bool:
        return not isinstance(atom, Literal) and known.get(atom, False)

    found: list[Draw] = []
    for equation in jaxpr.eqns:
        operands = [depends(atom) for atom in equation.invars]
        results = [any(operands)] * len(equation.outvars)
        if equation.primitive.name in _DRAWING:
            found.append(_draw(equation, operands[0], loops))
        inside = list(_inside(equation, operands))
        walked = [_walk(inner, own, loops + length) for inner, own, length in inside]
        found += [draw for draws, _ in walked for draw in draws]
        # Any of several programs may be the branch that is taken, and the batch may
        # choose it.
        if walked and all(len(own) == len(results) for _, own in walked):
            chosen = equation.primitive.name == "cond" and operands[0]
            results = [
                chosen or any(each)
                for each in zip(*(own for _, own in walked), strict=True)
            ]
        known.update(zip(equation.outvars, results, strict=True))
    return found, [depends(atom) for atom in jaxpr.outvars]


def _draw(equation: JaxprEqn, from_batch: bool, loops: tuple[int, ...]) -> Draw:
    name = equation.primitive.name
    taken: Any = equation.invars[0].aval
    # The last result, because `rng_bit_generator` returns its next key first.
    given: Any = equation.outvars[-1].aval
    keys, made = taken.shape, given.shape
    if name == "rng_bit_generator":
        keys = keys[:-1]  # The last dimension holds a key's bits.
    return Draw(name, (*loops, *keys), made[len(keys) :], from_batch)


def _inside(
    equation: JaxprEqn, operands: list[bool]
) -> Iterator[tuple[Jaxpr, list[bool], tuple[int, ...]]]:
    """Yields the inner programs of an equation.

    Each comes with the batch dependence of its arguments, and with the length of the
    loop that runs it.
    """
    counts = loop_counts(equation)
    for inner in jaxprs_in_params(equation.params):
        count = len(inner.invars)
        if counts is not None:
            own = _carried(inner, list(operands), *counts)
            yield inner, own, (equation.params["length"],)
        elif equation.primitive.name == "cond":  # The first operand chooses a branch.
            yield inner, operands[1:], ()
        # A while loop's operands are constants of two programs and the carry: equal
        # counts do not mean that they correspond.
        elif count == len(operands) and equation.primitive.name != "while":
            yield inner, operands, ()
        else:
            # An unknown correspondence: any argument may depend on the batch.
            yield inner, [any(operands)] * count, ()


def _carried(
    body: Jaxpr, given: list[bool], constants: int, carries: int
) -> list[bool]:
    """Which arguments of a loop's body depend on the batch, in some iteration."""
    # What one iteration makes of the batch is a carry of the next: a fixed point.
    while True:
        _, results = _walk(body, given, ())
        after = list(given)
        for i, depends in enumerate(results[:carries]):
            after[constants + i] |= depends
        if after == given:
            return given
        given = after
