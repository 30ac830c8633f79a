"""The backward program split in two, so that no work is done twice.

A pipeline wants the cotangents of the inputs early, since another stage waits for them,
and the gradients of the parameters whenever there is time. Running the backward twice,
each time for one half of its results, does the shared chain of cotangents twice. Here
the one program is cut, as the forward pass is, by `cheapest_cut`: values computed in
the first half are carried to the second unless they are cheap to recompute.

    params, kept, d_outputs --> first half ---+--> d_inputs
                                              | rest
                                              +--> second half --> d_params

The rest refers to existing arrays (parameters, kept values, cotangents) and holds only
values that are in none of these. Values that depend on parameters only are computed in
both halves if both need them: carried, they would be a copy of the weights per call.

A loop is one equation. If the first half needs any of its results, the whole loop runs
there, and the rest carries the finished gradients that it yields.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jdist._compat import equations_for, evaluate, part_of, without_unread
from jdist._tree import PyTree
from jdist.segment._programs.backward import BackwardProgram, Layout
from jdist.segment._programs.min_cut import cheapest_cut
from jdist.segment._programs.plan import ArrayLocations, keeping_cost
from jdist.segment._programs.recompute import may_repeat, recipes


@dataclass(frozen=True, eq=False)
class Split:
    """A backward program in two halves.

    Attributes:
      gradient: The whole backward program.
      locations: Locations of the rest's arrays among (params, kept, cotangents,
        cotangents of the inputs, computed). The ready gradients come first.
      second: The program of the gradients that are not ready, from the rest's arrays
        after the ready gradients.
      ready: For each gradient of a parameter, its position in the rest; None if the
        second half computes it.
    """

    gradient: BackwardProgram
    locations: ArrayLocations
    second: ClosedJaxpr
    ready: tuple[int | None, ...]

    def first(
        self, arguments: Sequence[Any], layout: Layout
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The cotangents of the inputs, and the rest's computed arrays."""
        whole = self.gradient
        results = [*whole.d_inputs, *self.locations.computed]
        inputs = whole.program.jaxpr.invars
        # All effects run here, and none in the second half, so that each happens once.
        program = part_of(whole.program, inputs, results, effects=True)
        found = evaluate(program, arguments)
        count = len(whole.d_inputs)
        computed = whole.placed(self.locations.computed, found[count:], layout)
        return whole.inputs_tree(found[:count], layout), tuple(computed)

    def finish(self, rest: Sequence[Any], layout: Layout) -> list[Any]:
        """The gradients of the parameters that are not ready."""
        count = len(self.ready) - self.ready.count(None)
        found = evaluate(self.second, rest[count:])
        pairs = zip(self.gradient.d_params, self.ready, strict=True)
        unready = [value for value, at in pairs if at is None]
        return self.gradient.placed(unready, found, layout)

    def gradients(self, rest: Sequence[Any], finished: Sequence[Any]) -> PyTree:
        """Tree like the parameters, of the ready and the finished gradients."""
        given = iter(finished)
        return self.gradient.params_tree(
            [next(given) if at is None else rest[at] for at in self.ready]
        )


def split(gradient: BackwardProgram) -> Split:
    """Splits a backward program; decides which values the rest carries."""
    program = gradient.program
    arguments = program.jaxpr.invars
    params, kept, cotangents = gradient.groups
    first = equations_for(program, arguments, gradient.d_inputs, effects=True)
    made_first = {x for equation in first for x in equation.outvars}
    # Held by the caller anyway, so that carrying them costs nothing.
    held = {*kept, *cotangents, *gradient.d_inputs}

    def repeats(equation: JaxprEqn) -> bool:
        # Computed twice only if that costs next to nothing.
        only_second = made_first.isdisjoint(equation.outvars)
        return only_second or may_repeat(equation, policy=False)

    # Values that depend on parameters alone are recomputed: carried, they would be a
    # copy of the weights for each call in flight.
    made_from = recipes(program, [*kept, *cotangents], repeats)

    def cost(value: Var) -> int | None:
        if value not in made_first and value not in held:
            return None  # Not there yet when the first half ends.
        return keeping_cost(value, held)

    needed = [x for x in gradient.d_params if isinstance(x, Var)]
    carried = cheapest_cut(needed, made_from, cost)
    groups = (params, kept, cotangents, gradient.d_inputs)
    ready = set(ArrayLocations.of(carried, *groups).computed)
    # The second of two parameters with one gradient gets a copy of its own: both may
    # be donated.
    places: list[int | None] = []
    unready: list[Any] = []
    ready_values: list[Var] = []
    for value in gradient.d_params:
        if value in ready and value not in ready_values:
            places.append(len(ready_values))
            ready_values.append(value)
        else:
            places.append(None)
            unready.append(value)
    sources = [*params, *carried]
    whole = part_of(program, sources, unready, effects=False)
    second, read = without_unread(whole, optional=len(sources))
    rest = [x for x, is_read in zip(sources, read, strict=True) if is_read]
    locations = ArrayLocations.of([*ready_values, *rest], *groups)
    return Split(gradient, locations, second, tuple(places))
