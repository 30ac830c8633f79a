"""Traced programs as data: evaluating, cutting and rewriting them.

Tested in `tests/segment/test_programs.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
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

Rewrite = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]


def trace(fn: Callable[..., Any], *arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of `fn` with nested jit calls opened, and its results' shapes."""
    nested, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    # A nested `jax.jit`, which most of `jax.numpy` is, would be one equation whose
    # parts cannot be told apart. One that says how to compile or to place its values
    # stays closed.
    return rewritten(nested, jax.tree.leaves(arguments), _opened), shapes


def trace_whole(fn: Callable[..., Any], *arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of `fn` as JAX writes it, and the shapes of its results."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    # JAX refers to the caller's memory, which may be written to before the program is
    # lowered. Rewritten only if so: most programs close over nothing of NumPy's.
    borrowed = any(isinstance(x, np.ndarray) for x in constants_of(program))
    return (_with_copies(program) if borrowed else program), shapes


def constants_of(program: ClosedJaxpr) -> Iterator[Any]:
    """The arrays that a program, or one inside it, closes over."""
    waiting: list[Any] = [program]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ClosedJaxpr | Jaxpr):  # One class from JAX 0.12 on.
            yield from getattr(value, "consts", ())
            waiting += [x for each in value.eqns for x in each.params.values()]
        elif type(value) in (tuple, list):
            waiting += value


def _with_copies(program: Any) -> Any:
    """The program with NumPy arrays of its own; their weak types stay."""
    made = with_equations(
        program, lambda each: [with_inner_programs(each, _with_copies)]
    )
    if not isinstance(made, ClosedJaxpr):
        return made
    consts = [x.copy() if isinstance(x, np.ndarray) else x for x in made.consts]
    return ClosedJaxpr(made.jaxpr, consts)


def with_equations(
    program: Any, change: Callable[[JaxprEqn], Sequence[JaxprEqn]]
) -> Any:
    """The program, open or closed, with other equations in place of each of its own."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    made = jaxpr.replace(eqns=[new for each in jaxpr.eqns for new in change(each)])
    # From JAX 0.12 on there is one class.
    return ClosedJaxpr(made, program.consts) if jaxpr is not program else made


def with_inner_programs(equation: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """The equation with each program inside it, open or closed, changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return change(value)
        if type(value) in (tuple, list):
            return type(value)(map(changed, value))
        return value

    if not inner_programs(equation):
        return equation
    params = {name: changed(value) for name, value in equation.params.items()}
    return equation.replace(params=params)


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
    """A function that computes a plain jit call; "pjit" was its name before 0.7."""
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
      body: The program from constants, carries and one slice to carries and one slice
        of results; nested jit calls are inlined.
      constants: Number of the body's arguments that are constants; they come first.
      carries: Number of its arguments and results that are carries.
      options: The other keyword arguments of the `lax.scan`.
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
    """How many constants and carries a loop has, or None if the equation is none."""
    if equation.primitive.name != "scan":
        return None
    details = equation.params
    # JAX wrote them as two numbers up to 0.10; from 0.11 it keeps the three groups of
    # arguments as a tree.
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
    # JAX checks that a program names the effects of its equations.
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
        # From the end backwards: a value is wanted before the equation that makes it is
        # met.
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
    """For each result of an equation, the values that it depends on."""
    arguments = [x for x in equation.invars if not isinstance(x, Literal)]
    single = _program_of(program, [equation])
    results = single.jaxpr.outvars
    if not inner_programs(equation) or len(results) < 2:
        return dict.fromkeys(results, arguments)
    # A loop or a branch may compute some results from some of its arguments only.
    found = {}
    for result in results:
        _, used = dce_jaxpr(single.jaxpr, [x is result for x in results])
        inputs = zip(single.jaxpr.invars, used, strict=True)
        found[result] = [x for x, is_used in inputs if is_used]
    return found


def inner_programs(equation: JaxprEqn) -> list[Any]:
    """The programs inside an equation: the body of a loop, the branches of a cond."""
    return list(jaxprs_in_params(equation.params))


def equations_in(program: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, each before those of the programs inside it."""
    # From JAX 0.12 on a program without constants is a ClosedJaxpr too.
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations_in(inner)


def has_references(program: ClosedJaxpr) -> bool:
    """Whether a program makes a mutable reference, or closes over one."""
    # The kernels of Pallas read and write references too, but make none so.
    return any(isinstance(x, jax.Ref) for x in constants_of(program)) or any(
        equation.primitive.name == "new_ref" for equation in equations_in(program)
    )


def picks_by_row(program: Jaxpr) -> bool:
    """Whether a program picks elements of each row by an index of that row.

    As `jnp.take_along_axis` does, which is a gather with batch dimensions.
    """
    numbers = (each.params.get("dimension_numbers") for each in equations_in(program))
    return any(getattr(each, "operand_batching_dims", ()) for each in numbers)


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
