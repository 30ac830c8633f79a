"""A reference that is one step function, and bounds on other right steps.

A `reference_step(state, batch) -> state` shows neither loss nor gradient. Its program
is evaluated in float64, piece by piece (`piecewise`): once exactly, and `FOLLOWED`
times with every equation perturbed by as much as a right program's rounding may reach
there, lambda deviations. Each step starts from perturbed states.

A right trainer may split the batch, so that what the reference sums at once it sums in
parts, each rounded to its own dtype. Such parts are sums of the same terms: every term
of every sum is perturbed as well, by EXTRA such roundings (`bound`, partial results).
The limit of a leaf follows from the distances as for a composed step (`trajectory`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._compat import double_precision
from jdist._errors import requirement
from jdist._tree import PyTree, descriptions, is_inexact, named_leaves, type_name
from jdist.verify.arguments import check_references
from jdist.verify.bound import confidence
from jdist.verify.draws import made_of_batch
from jdist.verify.evaluation.decisions import Choice
from jdist.verify.evaluation.lockstep import Value, paired
from jdist.verify.evaluation.piecewise import DRAWN, Pieces, kept_pieces
from jdist.verify.evaluation.products import rounding_note
from jdist.verify.measure import choices_in, magnified
from jdist.verify.steps.trajectory import (
    FOLLOWED,
    Moment,
    OtherSteps,
    changed,
    each_run,
    limits_of,
    named,
    on_host,
    size_of,
    stacked,
    starts,
    unsized,
)

Step = Callable[[PyTree, PyTree], Any]
"""`step(state, batch) -> state`, or `(state, anything else)`."""


class ReferenceStep:
    """A checked reference step, with the properties of its leaves.

    Attributes:
      advance: `advance(state, batch) -> state`.
      of_batch: Whether each leaf of the new state, by path, depends on the batch.
      unmeasured: Primitives of its program whose rounding could not be measured.
    """

    def __init__(self, step: Step, state: PyTree, batch: PyTree) -> None:
        self.unmeasured: set[str] = set()
        try:
            program, found = jax.make_jaxpr(step, return_shape=True)(state, batch)
        except Exception as error:
            error.add_note(
                "raised while verify.step traced the reference step: it must be a "
                "function of the state and the batch that JAX can trace, on one device"
            )
            raise
        check_references("step(reference_step=...)", program)
        # Training steps often return (state, metrics).
        pair = isinstance(found, tuple) and len(found) == 2
        self._beside = pair and not _difference(found[0], state)
        if not self._beside and (difference := _difference(found, state)):
            rule = "must return a state like the one that it is given"
            raise TypeError(requirement("step(reference_step=...)", rule, difference))

        def advance(state: PyTree, batch: PyTree) -> PyTree:
            return self.state_of(step(state, batch))

        self.advance = advance
        made = made_of_batch(advance, state, batch)
        own = {path: x for path, x in named_state(state).items() if x is not None}
        self.of_batch = dict(zip(own, made, strict=True))
        if not any(self.of_batch[path] and is_inexact(x) for path, x in own.items()):
            rule = "must return a state with numbers that depend on the batch"
            remedy = "If it keeps parameters of its own, return them."
            got = "none that does"
            call = "step(reference_step=...)"
            raise ValueError(requirement(call, rule, got, remedy))

    def state_of(self, result: PyTree) -> PyTree:
        """The new state in the result of a step; raises TypeError if there is none."""
        if not self._beside:
            return result
        if not isinstance(result, tuple) or len(result) != 2:
            rule = "must return (state, anything else), as the reference step does"
            got = type_name(result)
            raise TypeError(requirement("step_fn(state, batch)", rule, got))
        return result[0]

    def moments(
        self,
        state: PyTree,
        batches: Sequence[PyTree],
        accumulation: DTypeLike | None,
    ) -> Iterator[Moment]:
        """Runs the reference, step by step.

        Args:
          state: The state to start from.
          batches: One for each step.
          accumulation: The dtype in which 16-bit sums are accumulated.
        """
        advance = jax.jit(self.advance)
        # Before x64 is enabled, which would give NumPy arrays wider dtypes.
        state, batches = jax.tree.map(jnp.asarray, (state, batches))
        others = starts(state)
        origin = [wide[0] for wide in others]

        pieces_of = kept_pieces(accumulation)

        def steps(
            begin: int, state: PyTree, others: list[np.ndarray], change: Choice
        ) -> Iterator[Moment]:
            for t, batch in enumerate(batches[begin:], begin):
                program = advance.trace(state, batch).jaxpr
                factor = magnified(program)
                before = [wide[0] for wide in others]
                with double_precision(), jax.numpy_dtype_promotion("standard"):
                    pieces = pieces_of(program)
                    wide, sizes = _moved(pieces, factor, state, batch, others, t)
                self.unmeasured |= pieces.missed
                after, wide = changed(advance(state, batch), wide, change)
                wanted = on_host(named_state(after))
                # Perturbations of an all-float64 program are `factor` times too large.
                near = [x[:1] + (x - x[:1]) / factor for x in wide]
                limits, moves = limits_of(wanted, near, (origin, before), sizes, t + 1)
                taken = self.advance, state, others, (batch,), accumulation
                otherwise = OtherSteps(
                    cache(partial(choices_in, *taken)),
                    [path for path, x in wanted.items() if x is not None],
                    partial(steps, t, state, others),
                )
                yield Moment(
                    on_host(named_state(state)),
                    wanted,
                    limits,
                    moves,
                    dict(zip(moves, sizes, strict=True)),
                    notes=rounding_note(program),
                    otherwise=otherwise,
                )
                state, others, change = after, wide, {}

        return steps(0, state, others, {})


def _moved(
    pieces: Pieces,
    factor: float,
    state: PyTree,
    batch: PyTree,
    others: list[np.ndarray],
    step: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Takes one step from each state, of which 0 is exact; returns its size too."""

    def given(number: int) -> list[Value]:
        own = paired(jax.tree.leaves(state), (x[number] for x in others))
        return [*map(unsized, own), *jax.tree.leaves(batch)]

    amplitude = factor * confidence(sum(x[0].size for x in others))
    # One seed for each followed trainer and step.
    options = DRAWN._replace(in_parts=True), amplitude, step * (FOLLOWED + 1)
    runs = each_run(pieces, given, *options, sized=True)
    first = next(runs)
    sizes = [size_of(x) for x in first if is_inexact(x.wide)]
    return stacked([first, *runs]), sizes


def named_state(state: PyTree) -> dict[str, Any]:
    """The leaves of a state by path; of a tuple of two or three as `named` does."""
    if type(state) in (tuple, list) and len(state) in (2, 3):
        params, opt_state, *states = state
        return named(params, opt_state, *states, *[()] * (1 - len(states)))
    return named_leaves(state)


def _difference(found: PyTree, state: PyTree) -> str:
    """What of a new state is not as in the old one, in words; empty if all is."""
    new, old = (descriptions(named_leaves(tree)) for tree in (found, state))
    for path in [*old, *new]:
        got, wanted = (own.get(path, "no such leaf") for own in (new, old))
        if got != wanted:
            return f"{got} at {path} for {wanted}"
    given: Any = jax.tree.structure(state)
    same = given == jax.tree.structure(found)
    return "" if same else f"{type_name(found)} of other containers"
