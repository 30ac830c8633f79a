"""Scans split in two, so that they stack no more than their bodies require.

The derivative of a `lax.scan` stacks, for each iteration, every value that the
derivative of its body reads: for a layer `h -> gelu(h @ w)` six arrays, of which five
are element-wise functions of one. To the plan a loop is one equation, so that it could
only keep all of them. Here the body is cut as a whole segment is, by `cheapest_cut`,
and the loop becomes two: one that stacks the fewest bytes, followed by one without a
carry, which computes the stacks that the derivative reads. The second may run again in
the backward pass.

    scan: h -> gelu(h @ w), stacking a, b, c, d, e, f
      =  scan: h -> gelu(h @ w), stacking h, z;    map: h, z -> a, b, c, d, e, f

Slices of arrays that the loop scans over, such as the weights of its layers, need not
be stacked: the second loop scans over the same arrays.
"""

from collections.abc import Callable, Container, Sequence
from itertools import chain
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jdist._compat import Loop, byte_count, evaluate, loop_of, part_of, rewritten
from jdist.segment._programs.min_cut import cheapest_cut
from jdist.segment._programs.recompute import (
    Policy,
    depending_on,
    may_repeat,
    recipes,
)


def with_loops_cut(
    program: ClosedJaxpr,
    arguments: Sequence[Any],
    inputs: Sequence[Var],
    output_count: int,
    policy: Policy,
) -> ClosedJaxpr:
    """Rewrites the loops of a program whose first results are the outputs.

    Args:
      program: The program from parameters and inputs to outputs and residuals.
      arguments: The arguments it was traced with.
      inputs: Those of its variables that are inputs, not parameters.
      output_count: Number of its results that are outputs; they are left unchanged.
      policy: The recomputation policy.
    """
    jaxpr = program.jaxpr
    dependent = depending_on(program, inputs)
    readers = (equation.invars for equation in jaxpr.eqns)
    read = {
        x for x in chain(*readers, jaxpr.outvars[:output_count]) if isinstance(x, Var)
    }

    def rewrite(equation: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        loop = loop_of(equation)
        # A loop over parameters alone is recomputed from them as a whole.
        if loop is None or not dependent.intersection(equation.outvars):
            return None
        sources = zip(equation.invars, loop.body.jaxpr.invars, strict=True)
        changing = [
            inner
            for outer, inner in sources
            if isinstance(outer, Var) and outer in dependent
        ]
        stacks = equation.outvars[loop.carries :]
        stacked = loop.body.jaxpr.outvars[loop.carries :]
        places = [
            place
            for place, (outer, inner) in enumerate(zip(stacks, stacked, strict=True))
            if outer in dependent and outer not in read and isinstance(inner, Var)
        ]
        # Once each: a body may stack the same value for several readers.
        needed = dict.fromkeys(stacked[place] for place in places)
        kept = _kept(loop, changing, list(needed), policy)
        if sum(map(byte_count, kept)) >= sum(map(byte_count, needed)):
            return None  # A second loop would save nothing.
        return lambda *arguments: _run(loop, arguments, kept, places)

    return rewritten(program, arguments, rewrite)


def _kept(
    loop: Loop, changing: Sequence[Var], needed: Sequence[Var], policy: Policy
) -> list[Var]:
    """Chooses the fewest bytes per iteration that suffice for the body's residuals."""
    jaxpr = loop.body.jaxpr
    carries = jaxpr.invars[loop.constants :][: loop.carries]
    # Constants and slices: the second loop reads the same ones.
    given = set(jaxpr.invars).difference(carries)
    sources = [*carries, *changing]
    made_from = recipes(loop.body, sources, lambda e: may_repeat(e, policy), given)
    return cheapest_cut(needed, made_from, byte_count)


def _run(
    loop: Loop, arguments: Sequence[Any], kept: Sequence[Var], places: Container[int]
) -> list[Any]:
    """The results of the loop, by two; the second yields the stacks at `places`."""
    jaxpr = loop.body.jaxpr
    first, last = loop.constants, loop.constants + loop.carries
    constants, start = arguments[:first], arguments[first:last]
    slices = arguments[last:]
    carried, stacked = jaxpr.outvars[: loop.carries], jaxpr.outvars[loop.carries :]
    as_before = [x for place, x in enumerate(stacked) if place not in places]
    remade = [x for place, x in enumerate(stacked) if place in places]
    # All effects stay in the first loop: the second may run more than once.
    body = part_of(loop.body, jaxpr.invars, [*carried, *as_before, *kept], effects=True)
    sources = [*jaxpr.invars[:first], *jaxpr.invars[last:], *kept]
    second = part_of(loop.body, sources, remade, effects=False)

    def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        found = evaluate(body, [*constants, *carry, *slices])
        return found[: loop.carries], found[loop.carries :]

    def make_again(_: None, slices: list[Any]) -> tuple[None, list[Any]]:
        return None, evaluate(second, [*constants, *slices])

    final, stacks = jax.lax.scan(turn, list(start), list(slices), **loop.options)
    keeping = [*slices, *stacks[len(as_before) :]]
    # In any direction: without a carry the iterations are independent.
    _, made = jax.lax.scan(make_again, None, keeping, length=loop.options["length"])
    before, after = iter(stacks), iter(made)
    merged = [next(after if i in places else before) for i in range(len(stacked))]
    return [*final, *merged]
