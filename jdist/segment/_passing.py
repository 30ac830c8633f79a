"""Backward passes that compute nothing: they pass cotangents on.

The cotangent of a sum is that of each of its terms. A compiled program that returns
what it was given costs as much to call as one that computes something, and makes an
array for each input; on the way to another worker these are as many arrays to send.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Var

from jdist._tree import is_inexact
from jdist.segment._backward import gradient
from jdist.segment._plan import Plan
from jdist.segment._residuals import Residuals


def passed_on(residuals: Residuals, cotangents: Sequence[Any]) -> Sequence[Any] | None:
    """What `backward` would return for the inputs, if that is among `cotangents`.

    Args:
      residuals: Of a segment without parameters, whose inputs are arrays.
      cotangents: One for each leaf of the outputs.

    Returns:
      One for each input: these very arrays, or None where no cotangent flows. None in
      place of all: something is to be computed, or a cotangent does not fit.
    """
    if residuals.arrays or residuals.layout is not None:
        return None
    sources = _sources(residuals.plan)
    if sources is None:
        return None
    shapes = jax.tree.leaves(residuals.plan.outputs)
    for shape, value in zip(shapes, cotangents, strict=True):
        # None and NumPy's arrays have no such attribute; `backward` knows what to do.
        if getattr(value, "weak_type", True):
            return None
        if value.shape != shape.shape or value.dtype != shape.dtype:
            return None
    return [None if place is None else cotangents[place] for place in sources]


@functools.lru_cache(maxsize=1024)
def _sources(plan: Plan) -> tuple[int | None, ...] | None:
    """For each input the output whose cotangent is its own; None if one has another."""
    if plan.param_count or plan.kept:
        return None
    if not all(map(is_inexact, jax.tree.leaves(plan.outputs))):
        return None
    found = gradient(plan, (), (), plan.outputs)
    if found.program.effects:
        return None
    places = {given: place for place, given in enumerate(found.groups[2])}
    atoms = iter(found.program.jaxpr.outvars)
    sources: list[int | None] = []
    for is_trained in plan.trained:
        atom = next(atoms) if is_trained else None
        if atom is None or found.is_absent(atom):
            sources.append(None)
        elif isinstance(atom, Var) and atom in places:
            sources.append(places[atom])
        else:
            return None
    return tuple(sources)
