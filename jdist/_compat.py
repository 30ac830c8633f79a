"""The only file that knows JAX versions and what is not plain public API.

Everything else in jdist uses names that JAX documents. What differs between the
supported releases (0.10.2 and newer), or is reachable but undocumented, is wrapped
here, with a test in `tests/test_compat.py`, or for what `jdist.segment` is made of in
`tests/segment/test_programs.py`, that fails when JAX changes it.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxprs_in_params,
)
from jax.interpreters.ad import Zero
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

Rewrite = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]


def double_precision() -> AbstractContextManager[None]:
    """Within it JAX computes with 64-bit types, whatever the global setting."""
    return jax.enable_x64(True)


def set_cpu_device_count(count: int) -> None:
    """Gives this process `count` CPU devices; before the first JAX computation only.

    Raises:
      RuntimeError: A JAX computation has already started the backend. (JAX's own.)
    """
    jax.config.update("jax_num_cpu_devices", count)


def is_traced(value: object) -> bool:
    """Whether `value` is known only by shape and dtype, inside a JAX transformation."""
    return isinstance(value, jax.core.Tracer)


def placed(
    array: np.ndarray, device: jax.Device | None, weak: bool = False
) -> jax.Array:
    """`jax.device_put`, in a fifth of its time, and for any dtype and weak type.

    At 3 x 3 on CPU `device_put` takes 28 us, most of it in Python. Without the checks
    made there, 64-bit types stay what they are also where they are switched off, and a
    weak type can be given, for which JAX documents no way. As there, memory at a
    multiple of 64 bytes is taken over on CPU.

    Args:
      array: In C order and of the machine's byte order; nobody writes to it any more.
      device: The result is committed to it; None for the default, not committed.
      weak: Whether the type yields to others in promotion, as a Python number's does.

    Raises:
      jax.errors.JaxRuntimeError: JAX has no such dtype.
    """
    committed = device is not None
    if device is None:
        device = _default_device()
    abstract = _abstract(array.shape, array.dtype, weak)
    sharding = _only_on(device)
    return xla_client.batched_device_put(
        abstract, sharding, [array], [device], committed, enable_x64=True
    )


@functools.lru_cache(1024)
def _abstract(
    shape: tuple[int, ...], dtype: np.dtype, weak: bool
) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, dtype, weak_type=weak)


@functools.cache
def _only_on(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


def _default_device() -> jax.Device:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def varying_axes(array: jax.Array) -> frozenset[Hashable]:
    """The mesh axes over which shard_map *knows* that `array` differs.

    Empty outside shard_map, and inside shard_map with `check_vma=False`. JAX renamed
    the attribute: `vma` up to 0.9, `manual_axis_type.varying` from 0.10.
    """
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def tracks_varying_axes(axis_name: Hashable) -> bool:
    """Whether the surrounding shard_map checks what varies over `axis_name`.

    Only a checking shard_map gives `axis_index` a varying type. False under pmap and
    vmap, whose tracers carry no such type.
    """
    return axis_name in varying_axes(jax.lax.axis_index(axis_name))


def map_shards(
    fn: Callable[..., Any], mesh: Mesh, in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check of varying axes, for any type of mesh.

    Without the check, gradients taken inside `fn` are each shard's own, loops need no
    casts of their carries, and the outputs of `all_gather` count as replicated. A mesh
    with explicit axes refuses inputs that are laid out differently; they are
    re-sharded here, as a mesh with automatic axes does by itself.
    """
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
    )
    if AxisType.Explicit not in mesh.axis_types:
        return mapped

    def resharded(*arguments: Any) -> Any:
        placed = (
            jax.tree.map(lambda x, spec=spec: _reshard(x, mesh, spec), argument)
            for argument, spec in zip(arguments, in_specs, strict=True)
        )
        return mapped(*placed)

    return resharded


def after(array: jax.Array, earlier: jax.Array) -> jax.Array:
    """`array`, bit for bit, but never before `earlier` has been computed.

    XLA merges collectives that do not depend on each other (on CPU in its pass
    `cpu-all-reduce-combiner`) and takes `optimization_barrier` out before it looks.
    What it respects is a dependence on data: the comparison is false for every number
    and for NaN, and XLA does not know.
    """
    if not array.size or not earlier.size:
        return array
    own = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    signal = jax.lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim)
    never = signal.real.reshape(()) < -jnp.inf
    kept = jnp.where(never, jnp.zeros_like(own), own)
    return jax.lax.dynamic_update_slice(array, kept, (0,) * array.ndim)


def laid_out(array: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """`array` with a layout over any type of mesh, inside jit and outside.

    To automatic axes a layout is a constraint on the compiler, to explicit ones a part
    of the array's type.
    """
    if AxisType.Explicit in mesh.axis_types:
        return _reshard(array, mesh, spec)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _reshard(array: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))


# --- programs as data: what `jdist.segment` is made of ---
#
# Tested in `tests/segment/test_programs.py`.


def trace(fn: Callable[..., Any], *arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of `fn` with nested jit calls opened, and the shapes of its results.

    A nested `jax.jit`, which most of `jax.numpy` is, would otherwise be one equation
    whose parts cannot be told apart. A call stays closed where it says how to compile
    or to place its values.
    """
    nested, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    return rewritten(nested, jax.tree.leaves(arguments), _opened), shapes


def rewritten(
    program: ClosedJaxpr, arguments: Sequence[Any], rewrite: Rewrite
) -> ClosedJaxpr:
    """The program with some of its equations computed in another way.

    Args:
      program: The program.
      arguments: Arrays, or abstract values, like its arguments.
      rewrite: For an equation a function from its arguments to its results, or None if
        it is to stay.
    """

    def run(*leaves: Any) -> list[Any]:
        return _evaluate_rewritten(program, leaves, rewrite)

    return jax.make_jaxpr(run)(*arguments)


def _evaluate_rewritten(
    program: ClosedJaxpr, arguments: Sequence[Any], rewrite: Rewrite
) -> list[Any]:
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        compute = rewrite(equation)
        if compute is not None:
            results = compute(*[read(x) for x in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        else:
            single = _program_of(program, [equation])
            results = evaluate(single, [values[x] for x in single.jaxpr.invars])
            values.update(zip(single.jaxpr.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _opened(equation: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """What a plain jit call computes; "pjit" was its name before 0.7."""
    details = equation.params
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    placed = (*details["in_shardings"], *details["out_shardings"])
    plain = (
        all(type(sharding).__name__ == "UnspecifiedValue" for sharding in placed)
        and not any((*details["in_layouts"], *details["out_layouts"]))
        and not any(details["donated_invars"])
        and not details["compiler_options_kvs"]
    )
    inner: ClosedJaxpr = details["jaxpr"]
    return (lambda *args: _evaluate_rewritten(inner, args, _opened)) if plain else None


class Loop(NamedTuple):
    """The parts of a `lax.scan`, whose body is a program of its own.

    Attributes:
      body: From constants, carries and one slice to carries and one slice of results;
        nested jit calls are opened.
      constants: How many of the body's arguments are constants; they come first.
      carries: How many of its arguments and results are carries.
      options: What else `lax.scan` was given.
    """

    body: ClosedJaxpr
    constants: int
    carries: int
    options: dict[str, Any]


def loop_of(equation: JaxprEqn) -> Loop | None:
    """The parts of a loop, or None if the equation is none."""
    counts = loop_counts(equation)
    if counts is None:
        return None
    details = equation.params
    body: ClosedJaxpr = details["jaxpr"]
    opened = rewritten(body, [x.aval for x in body.jaxpr.invars], _opened)
    options = {name: details[name] for name in ("length", "reverse", "unroll")}
    return Loop(opened, *counts, options)


def loop_counts(equation: JaxprEqn) -> tuple[int, int] | None:
    """How many constants and carries a loop has, or None if the equation is none.

    JAX wrote them as two numbers up to 0.10; from 0.11 it keeps the three groups of
    arguments as a tree.
    """
    if equation.primitive.name != "scan":
        return None
    details = equation.params
    if "num_carry" in details:
        return details["num_consts"], details["num_carry"]
    constants, carries, _ = details["ft_in"].unpack()
    return len(constants), len(carries)


def _program_of(program: ClosedJaxpr, equations: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """A program of these equations only; its results are all that they compute."""
    results = [x for e in equations for x in e.outvars if not isinstance(x, DropVar)]
    made = set(results)
    read = [x for e in equations for x in e.invars if not isinstance(x, Literal)]
    inputs = [x for x in dict.fromkeys(read) if x not in made]
    return _rearranged(program, inputs, results, equations, consts=False)


def _rearranged(
    program: ClosedJaxpr,
    inputs: Sequence[Any],
    results: Sequence[Any],
    equations: Sequence[JaxprEqn],
    *,
    consts: bool = True,
) -> ClosedJaxpr:
    jaxpr = program.jaxpr
    effects = frozenset().union(*(equation.effects for equation in equations))
    replaced = jaxpr.replace(
        constvars=jaxpr.constvars if consts else [],
        invars=list(inputs),
        outvars=list(results),
        eqns=list(equations),
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(replaced, program.consts if consts else [])


def evaluate(program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """The results of a program, as a traceable and differentiable computation."""
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *arguments)


def equations_for(
    program: ClosedJaxpr,
    inputs: Sequence[Var],
    results: Sequence[Any],
    *,
    effects: bool,
) -> list[JaxprEqn]:
    """The equations that lead from some values of a program to others, in order."""
    given = set(inputs)
    wanted = {x for x in results if not isinstance(x, Literal)} - given
    needed: list[JaxprEqn] = []
    for equation in reversed(program.jaxpr.eqns):
        if wanted.intersection(equation.outvars) or (effects and equation.effects):
            needed.append(equation)
            wanted |= {x for x in equation.invars if not isinstance(x, Literal)} - given
    return needed[::-1]


def part_of(
    program: ClosedJaxpr,
    inputs: Sequence[Var],
    results: Sequence[Any],
    *,
    effects: bool,
) -> ClosedJaxpr:
    """The part of a program that leads from any of its values to any others.

    Args:
      program: What `trace` returned.
      inputs: Values that the part is given; they need not be the program's inputs.
      results: Values that it computes.
      effects: Whether printing, callbacks and the like belong to the part.
    """
    given = set(inputs)
    equations = [
        equation.replace(
            outvars=[DropVar(x.aval) if x in given else x for x in equation.outvars]
        )
        for equation in equations_for(program, inputs, results, effects=effects)
    ]
    cut = _rearranged(program, inputs, results, equations)
    # Loops and branches are still whole; this drops what is not needed inside them.
    pruned, _ = dce_jaxpr(cut.jaxpr, [True] * len(results), instantiate=True)
    return ClosedJaxpr(pruned, cut.consts)


def without_unread(
    program: ClosedJaxpr, optional: int
) -> tuple[ClosedJaxpr, list[bool]]:
    """Drops those of the first inputs that no result depends on.

    Args:
      program: What `trace` returned.
      optional: How many of its inputs may be dropped; the others stay, read or not.

    Returns:
      The program, and for each optional input whether it is still there.
    """
    everything = [True] * len(program.jaxpr.outvars)
    fixed = [i >= optional for i in range(len(program.jaxpr.invars))]
    pruned, read = dce_jaxpr(program.jaxpr, everything, instantiate=fixed)
    return ClosedJaxpr(pruned, program.consts), list(read[:optional])


def reads(equation: JaxprEqn, program: ClosedJaxpr) -> dict[Var, list[Var]]:
    """For each result of an equation, the values that it depends on.

    An equation that holds programs (a loop, a branch) may compute some of its results
    from some of its arguments only.
    """
    arguments = [x for x in equation.invars if not isinstance(x, Literal)]
    single = _program_of(program, [equation])
    results = single.jaxpr.outvars
    if not inner_programs(equation) or len(results) < 2:
        return dict.fromkeys(results, arguments)
    found = {}
    for result in results:
        _, used = dce_jaxpr(single.jaxpr, [x is result for x in results])
        inputs = zip(single.jaxpr.invars, used, strict=True)
        found[result] = [x for x, is_used in inputs if is_used]
    return found


def inner_programs(equation: JaxprEqn) -> list[Any]:
    """The programs inside an equation: the body of a loop, the branches of a cond."""
    return list(jaxprs_in_params(equation.params))


def called_program(equation: JaxprEqn) -> Jaxpr | None:
    """The program that an equation runs once, argument by argument; or None.

    That is a nested `jax.jit` ("pjit" before 0.7), a checkpoint, or a function with a
    derivative of its own: no loop and no branch.
    """
    calls = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")
    custom = ("custom_jvp_call", "custom_vjp_call", "remat2")
    inner = inner_programs(equation)
    if equation.primitive.name not in calls + custom or len(inner) != 1:
        return None
    program = inner[0]
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def byte_count(value: Var) -> int:
    """Bytes of one value of a program; for a PRNG key those of its words."""
    kind: Any = value.aval
    return int(kind.size) * int(kind.dtype.itemsize)


def no_cotangent(shape: jax.ShapeDtypeStruct) -> Any:
    """In place of an output's cotangent: a zero that JAX leaves out of the work."""
    return Zero(jax.core.ShapedArray(shape.shape, shape.dtype))
