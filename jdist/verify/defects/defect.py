"""Defects, named ways in which a step goes wrong, and steps that have one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact, named_leaves, type_name, words
from jdist.verify.bound import in_double
from jdist.verify.defects.step_call import (
    Kind,
    NoEffect,
    NotApplicable,
    Step,
    StepCall,
    Traits,
)

Alteration = Callable[[StepCall], PyTree]
"""Maps a call of the right step to the wrong result."""


@dataclass(frozen=True, slots=True)
class Defect:
    """A way in which a step goes wrong.

    Attributes:
      name: Short name, a few words.
      sentence: What the wrong step does.
      kinds: The kinds of step that can have it: "gradient", "training".
      alteration: Maps a call of the right step to the wrong result.
      needs: Requirements on the step or the batch, in words; empty for none.
    """

    name: str
    sentence: str
    kinds: tuple[Kind, ...]
    alteration: Alteration
    needs: str = ""

    def plant(self, step: Step, traits: Traits | None = None) -> "PlantedStep":
        """Returns the wrong twin of a right step.

        Args:
          step: `(params, batch, *rest) -> (loss, gradient)`, or, of kind "training",
            `(params, opt_state, batch, *rest) -> (params, opt_state)`. It is called
            several times for each call of its twin, always with batches of the same
            shapes and dtypes, and must not donate its arguments.
          traits: What is known of the step; None for `Traits()`.

        Returns:
          A function that is called like the step, with arrays: compile the step itself
          (`jax.jit`), and not its twin.

        Raises:
          NotApplicable: A step of this kind cannot have the defect. On calling: the
            step or the batch lacks what the defect needs, or the call is being traced.
          NoEffect: On calling: the wrong result is the right one, bit for bit.
          ValueError: On calling: a path in `traits` that is not in the batch or in the
            parameters.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jdist.verify import defects
          >>> step = jax.value_and_grad(lambda w, x: jnp.mean((x - w) ** 2))
          >>> [defect] = [d for d in defects.GRADIENT if d.name == "lost example"]
          >>> x, w = jnp.array([0.0, 3.0, 6.0]), jnp.array(1.5)
          >>> wrong = defect.plant(step)
          >>> print(step(w, x)[1], wrong(w, x)[1])
          -3.0 0.0
        """
        given = traits or Traits()
        if given.kind not in self.kinds:
            raise NotApplicable(f"no step of kind {given.kind!r} can have it")
        return PlantedStep(self, step, given)


def declared(
    table: list[Defect], *kinds: Kind
) -> Callable[..., Callable[[Alteration], Alteration]]:
    """A decorator, `(name, needs="")`, of the alterations in a table of defects.

    The docstring of an alteration is the sentence.
    """

    def named(name: str, needs: str = "") -> Callable[[Alteration], Alteration]:
        def add(alteration: Alteration) -> Alteration:
            sentence = " ".join((alteration.__doc__ or "").split())
            table.append(Defect(name, sentence, kinds, alteration, needs))
            return alteration

        return add

    return named


class PlantedStep:
    """A right step with a defect in it.

    The arguments of the last call are kept for defects that compute with stale values.

    Args:
      defect: What to plant.
      step: The right step.
      traits: What is known of it.
      silent: Whether a call in which nothing can be planted returns the right result,
        with the reason in `refusals`, as `verify.score` needs; otherwise such a call
        raises `NotApplicable` or `NoEffect`.

    Attributes:
      refusals: Why nothing was planted, for each call without a defect.
      size: The largest effect in any call: the distance of the wrong result from the
        right one, relative to it, in the 2-norm of a leaf; infinite where the structure
        differs or a number is not finite.
      error: The last exception of the right step itself; None if there was none.
    """

    def __init__(
        self, defect: Defect, step: Step, traits: Traits, silent: bool = False
    ) -> None:
        self.refusals: list[NotApplicable | NoEffect] = []
        self.size = 0.0
        self.error: Exception | None = None
        self._defect = defect
        self._silent = silent
        self._step = step
        self._traits = traits
        self._previous: tuple[Any, ...] | None = None

    def __call__(self, *arguments: PyTree) -> PyTree:
        """The wrong result."""
        # Stored first: a call that raises is a predecessor of the next one too.
        previous, self._previous = self._previous, arguments
        call = StepCall(
            self._right, arguments, previous, self._traits, self._defect.name
        )
        try:
            return self._wrong(call)
        except (NotApplicable, NoEffect) as error:
            self.refusals.append(error)
            # A stale value needs a second call, which an exception here would prevent.
            shown_later = isinstance(error, NoEffect) and not error.final
            if self._silent or shown_later:
                return call.right
            raise

    def _wrong(self, call: StepCall) -> PyTree:
        _check(call.arguments, self._traits.kind)
        right = call.right
        # Only a call shows whether a step donates what it is given.
        _check_kept(call.arguments)
        wrong = self._defect.alteration(call)
        size = distance(right, wrong)
        if size == 0:
            raise NoEffect("the wrong result is the right one, bit for bit")
        self.size = max(self.size, size)
        return wrong

    def _right(self, *arguments: PyTree) -> PyTree:
        try:
            result = self._step(*arguments)
        except Exception as error:
            # Kept, so that a crash of the step is not taken for a failing test.
            self.error = error
            raise
        if not isinstance(result, tuple) or len(result) != 2:
            kind = self._traits.kind
            pair = "loss, gradient" if kind == "gradient" else "params, opt_state"
            rule, got = f"must return ({pair})", type_name(result)
            raise TypeError(requirement("Defect.plant(step)", rule, got))
        return result


def _check(arguments: tuple[Any, ...], kind: Kind) -> None:
    least = 2 if kind == "gradient" else 3
    if len(arguments) < least:
        rule = f"is called with {least} arguments at least, none of them by name"
        got = str(len(arguments))
        raise TypeError(requirement("Defect.plant(step)", rule, got))
    for leaf in jax.tree.leaves(arguments):
        # Defects compute with concrete values, on the host.
        if isinstance(leaf, jax.core.Tracer):
            raise NotApplicable(
                "the planted step is being traced: compile the step, not its twin"
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise NotApplicable("an argument lies on devices of several processes")


def _check_kept(arguments: tuple[Any, ...]) -> None:
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise NotApplicable("the step donates its arguments: build it without")


def distance(right: PyTree, wrong: PyTree) -> float:
    """The largest relative distance of two leaves in the 2-norm.

    Infinite where structure, dtype or shape differ, where a number is not finite on one
    side, and where only the right leaf is 0.
    """
    leaves, others = named_leaves(right), named_leaves(wrong)
    if leaves.keys() != others.keys():
        return np.inf
    return max(
        (_leaf_distance(x, others[path]) for path, x in leaves.items()), default=0.0
    )


def _leaf_distance(right: PyTree, wrong: PyTree) -> float:
    if right is None or wrong is None:
        return 0.0 if right is wrong else np.inf
    # Random keys are compared by their bits.
    a, b = (np.asarray(words(leaf)) for leaf in (right, wrong))
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    if not is_inexact(a):
        return 0.0 if np.array_equal(a, b) else np.inf
    wide_a, wide_b = in_double(a), in_double(b)
    if np.array_equal(wide_a, wide_b, equal_nan=True):
        return 0.0
    off, own = np.linalg.norm(wide_b - wide_a), np.linalg.norm(wide_a)
    return float(off / own) if own > 0 and np.isfinite(off) else np.inf
