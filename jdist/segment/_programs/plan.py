"""The forward program, and the values that it keeps for the backward pass.

`jax.vjp` keeps every value that the linearised program reads. Among them are
parameters, and values computed from parameters alone (a transpose, a cast, a normalised
weight). With k micro-batches in flight each such value exists k times, although the
caller has the parameters and could recompute it.

The plan decides otherwise, on the traced program, in which every value is visible.
Residuals are the values that the linear part reads. Those that depend on no input are
not kept: the backward pass recomputes them from the parameters it is given. For the
others `cheapest_cut` finds the fewest bytes from which all of them can be recomputed by
equations that `may_repeat`. A kept value is therefore an input or an output of the
segment, which the caller holds too and which is kept by reference, or a value that the
forward program returns besides the outputs.

    params ----> W.T ------------------------------> recomputed from params
                  |
    inputs --+--> z = x @ W.T --> tanh z --+-------> outputs
             |                      |      |
             +----------------------+------+-------> kept: x, tanh z; by reference

The function is traced once. Tracing it a second time to compare would be unsafe, since
nothing promises the same order of residuals.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var

from jdist._compat import (
    byte_count,
    evaluate,
    no_cotangent,
    part_of,
    trace,
    without_unread,
)
from jdist._tree import PyTree, is_inexact
from jdist.segment._programs.loops import with_loops_cut
from jdist.segment._programs.min_cut import cheapest_cut
from jdist.segment._programs.recompute import (
    Policy,
    may_repeat,
    recipes,
)


@dataclass(frozen=True, slots=True)
class ArrayLocations:
    """The positions of values in groups of arrays, outside of compiled code.

    Attributes:
      places: For each value the index of its group, and its position there. The arrays
        of the last group are computed; those of the others are held anyway.
      computed: The values of the last group.
    """

    places: tuple[tuple[int, int], ...]
    computed: tuple[Var, ...]

    @classmethod
    def of(cls, values: Iterable[Var], *groups: Sequence[Any]) -> "ArrayLocations":
        """Finds each value in the first group that has it; the others are computed."""
        known: dict[Var, tuple[int, int]] = {}
        for number, group in enumerate(groups):
            for place, atom in enumerate(group):
                if isinstance(atom, Var):
                    # The first group wins: an output that is an input is held as the
                    # input.
                    known.setdefault(atom, (number, place))
        places: list[tuple[int, int]] = []
        computed: list[Var] = []
        for value in values:
            if value not in known:
                known[value] = (len(groups), len(computed))
                computed.append(value)
            places.append(known[value])
        return cls(tuple(places), tuple(computed))


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """The forward program of one function and one set of shapes, and the kept values.

    Two plans are equal only if they are the same object; JAX keys compiled functions by
    it.

    Attributes:
      program: From the leaves of (params, inputs) to the leaves of the outputs and,
        after them, the residuals that JAX's own `vjp` would keep.
      arguments: The tree structure of (params, inputs).
      trained: For each leaf of (params, inputs), whether it is floating.
      param_count: Number of the leaves that are parameters; these come first.
      outputs: Tree like the outputs, of shapes and dtypes.
      pull_back: JAX's pull-back with shapes and dtypes in place of the residuals.
      kept: The values that are kept, in the order of `locations`.
      locations: Locations of the kept values among (inputs, outputs, computed).
      policy: The recomputation policy.
      owner: Identity token of the halves that made the plan.
    """

    program: ClosedJaxpr
    arguments: Any
    trained: tuple[bool, ...]
    param_count: int
    outputs: Any
    pull_back: Any
    kept: tuple[Var, ...]
    locations: ArrayLocations
    policy: Policy
    owner: object

    def forward(self, leaves: Sequence[Any]) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The outputs, and the kept values that are neither inputs nor outputs."""
        jaxpr = self.program.jaxpr
        structure = jax.tree.structure(self.outputs)
        count = len(jax.tree.leaves(self.outputs))
        results = [*jaxpr.outvars[:count], *self.locations.computed]
        program = part_of(self.program, jaxpr.invars, results, effects=True)
        found = evaluate(program, leaves)
        return jax.tree.unflatten(structure, found[:count]), tuple(found[count:])

    def linear_part(self, live: Sequence[bool]) -> tuple[ClosedJaxpr, list[Any]]:
        """The program that pulls back the live cotangents, and the residuals it reads.

        Args:
          live: For each floating output whether it has a cotangent. Work needed only
            for the others is left out of the program.

        Returns:
          The program, from residuals and live cotangents to the cotangents of the
          trained leaves; and the values of `program` that are those residuals.
        """
        shapes = [x for x in jax.tree.leaves(self.outputs) if is_inexact(x)]
        residuals, structure = jax.tree.flatten(self.pull_back)

        def pull(residuals: list[Any], cotangents: list[Any]) -> PyTree:
            given = iter(cotangents)
            pull_back = jax.tree.unflatten(structure, residuals)
            # Symbolic zeros: JAX traces no work for them.
            return pull_back(
                [
                    next(given) if is_live else no_cotangent(shape)
                    for shape, is_live in zip(shapes, live, strict=True)
                ]
            )

        cotangents = [x for x, is_live in zip(shapes, live, strict=True) if is_live]
        traced, _ = trace(pull, residuals, cotangents)
        linear, read = without_unread(traced, optional=len(residuals))
        values = self.program.jaxpr.outvars[-len(residuals) :] if residuals else []
        return linear, [x for x, is_read in zip(values, read, strict=True) if is_read]


def plan(
    fn: Callable[..., Any], params: PyTree, given: PyTree, policy: Policy, owner: object
) -> ForwardPlan:
    """Traces `fn(params, *given)` with its pull-back; decides what to keep."""
    leaves, arguments = jax.tree.flatten((params, given))
    trained = tuple(map(is_inexact, leaves))
    param_count = len(jax.tree.leaves(params))

    def run(*leaves: PyTree) -> PyTree:
        def outputs_of(floating: list[Any]) -> PyTree:
            given = iter(floating)
            merged = [
                next(given) if is_trained else leaf
                for leaf, is_trained in zip(leaves, trained, strict=True)
            ]
            params, inputs = jax.tree.unflatten(arguments, merged)
            outputs = fn(params, *inputs)
            return [x for x in jax.tree.leaves(outputs) if is_inexact(x)], outputs

        floating = [
            x for x, is_trained in zip(leaves, trained, strict=True) if is_trained
        ]
        _, pull_back, outputs = jax.vjp(outputs_of, floating, has_aux=True)
        return outputs, pull_back

    program, (outputs, pull_back) = trace(run, *leaves)
    if policy is not True:  # Otherwise the whole loop runs again.
        inputs = program.jaxpr.invars[param_count:]
        output_count = len(jax.tree.leaves(outputs))
        program = with_loops_cut(program, leaves, inputs, output_count, policy)
    undecided = ForwardPlan(
        program, arguments, trained, param_count, outputs, pull_back,
        (), ArrayLocations((), ()), policy, owner,
    )  # fmt: skip
    # For all cotangents: which of them are absent is known in the backward pass only.
    every = [True] * sum(map(is_inexact, jax.tree.leaves(outputs)))
    _, needed = undecided.linear_part(every)
    kept, locations = _choose(undecided, [x for x in needed if isinstance(x, Var)])
    return replace(undecided, kept=kept, locations=locations)


def _choose(
    plan: ForwardPlan, needed: Sequence[Var]
) -> tuple[tuple[Var, ...], ArrayLocations]:
    """Chooses the fewest bytes from which all needed values can be recomputed."""
    jaxpr = plan.program.jaxpr
    inputs = jaxpr.invars[plan.param_count :]
    outputs = jaxpr.outvars[: len(jax.tree.leaves(plan.outputs))]
    # What depends on none is recomputed from parameters, which the caller has.
    made_from = recipes(plan.program, inputs, lambda e: may_repeat(e, plan.policy))
    # The caller holds these, and they are kept by reference.
    held = {x for x in (*inputs, *outputs) if isinstance(x, Var)}

    def cost(value: Var) -> int:
        # With recompute=True inputs are kept whatever their size, and nothing else.
        if plan.policy is True and value in inputs:
            return 0
        return keeping_cost(value, held)

    kept = tuple(cheapest_cut(needed, made_from, cost))
    return kept, ArrayLocations.of(kept, inputs, outputs)


def keeping_cost(value: Var, held: Container[Var]) -> int:
    """The cost of keeping a value: twice its bytes, less one if it is held anyway."""
    # Doubled, so that the one breaks ties and nothing else.
    return max(0, 2 * byte_count(value) - (value in held))
