"""Asynchronous epochs as one compiled program: a scan over updates.

What a micro-batch meets at each stage is a matrix of version numbers, and follows from
the order of actions alone. The program goes through the micro-batches one after the
other, and looks up the versions that each meets in rings: a stage keeps as many as its
largest delay needs. Passes are the halves that a `Pipeline` runs, cut by
`jdist.segment`, so that the results have the same bits as those of its executor.

Thousands of runs take one compilation: `jax.vmap` maps the program over seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._asynchronous.rules import Now, Number, Place, PyTree, Rule
from jdist import pipeline, reduction, segment


class MicroBatches(NamedTuple):
    """Micro-batches of one size, stacked.

    Attributes:
      batch: Arrays by name, `(micro-batches, examples, ..)`.
      weights: `(micro-batches, examples)`: shares of each micro-batch's mean.
      totals: `(micro-batches,)`: the sums of the weights that were given.
    """

    batch: Mapping[str, PyTree]
    weights: Any
    totals: Any


class Trained(NamedTuple):
    """The end of an epoch.

    Attributes:
      params: The newest weights of each stage.
      losses: Of each micro-batch, at the weights that it met, `(micro-batches,)`.
    """

    params: list[PyTree]
    losses: jax.Array


class _Stage(NamedTuple):
    """What the scan carries of a stage; the ring has what its versions show."""

    params: PyTree
    state: PyTree
    ring: PyTree


class Program:
    """An epoch under a rule and a version matrix, as one function to compile.

    Args:
      stages: Stages of one input and one output; the batch has the first input.
      loss_fn: As for `pipeline.Pipeline`; the reduction is the mean.
      rule: The rule of every stage; or one for each.
      versions: The version that each micro-batch meets, `(stages, micro-batches)`; see
        `Schedule.versions_used`.
      every: Micro-batches of an update; their number is a multiple of it.

    Attributes:
      places: The stages, with their delays.
      kept: The number of versions that each stage's ring has.

    Raises:
      ValueError: The micro-batches are no multiple of `every`; a version is not made
        yet when it is met; or `rule` is not one for each stage.
    """

    def __init__(
        self,
        stages: Sequence[pipeline.Stage],
        loss_fn: Callable[..., jax.Array],
        rule: Rule | Sequence[Rule],
        versions: np.ndarray,
        every: int = 1,
    ) -> None:
        n, m = versions.shape
        if m % every:
            raise ValueError(f"{m} micro-batches must be a multiple of every={every}")
        lags = np.arange(m) // every - versions
        if lags.min() < 0:
            stage, micro = np.argwhere(lags < 0)[0]
            got = f"stage {stage}, micro-batch {micro}, "
            got += f"version {versions[stage, micro]}"
            raise ValueError(f"versions must be made when they are met: {got}")
        self._rules = [rule] * n if isinstance(rule, Rule) else list(rule)
        if not len(self._rules) == len(stages) == n:
            got = f"{len(self._rules)} rules, {len(stages)} stages, {n} rows"
            raise ValueError(f"rule must be one, or one for each stage: {got}")
        self.kept = tuple((lags.max(axis=1) + 1).tolist())
        self.places = [Place(j, n, kept - 1) for j, kept in enumerate(self.kept)]
        self._segments = [segment.segment(stage.fn) for stage in stages]
        self._input = stages[0].inputs[0]
        self._loss_fn, self._every = loss_fn, every
        slots = versions.T % np.array(self.kept)
        self._slots = slots.reshape(m // every, every, n).astype(np.int32)

    def __call__(
        self, params: Sequence[PyTree], data: MicroBatches, rate: Number | None = None
    ) -> Trained:
        """Trains one epoch; pure, so that it can be jitted and mapped.

        Args:
          params: The weights of each stage.
          data: As many micro-batches as the version matrix has.
          rate: The learning rate; None: that of the rule's optimizer.
        """
        updates = len(self._slots)
        data = jax.tree.map(
            lambda x: x.reshape(updates, self._every, *x.shape[1:]), data
        )
        steps = (jnp.arange(updates, dtype=jnp.int32), jnp.asarray(self._slots), data)
        begun = [self._begun(j, own, rate) for j, own in enumerate(params)]

        def step(stages: list[_Stage], given: Any) -> Any:
            return self._updated(stages, rate, *given)

        stages, losses = jax.lax.scan(step, begun, steps)
        return Trained([stage.params for stage in stages], losses.reshape(-1))

    def _begun(self, j: int, params: PyTree, rate: Number | None) -> _Stage:
        rule = self._rules[j]
        state = rule.begin(params)
        seen = rule.forward(self.places[j], Now(jnp.int32(0), params, state, rate))
        # Version 0 in all places: whichever is read before the first update is it.
        ring = jax.tree.map(
            lambda w: jnp.broadcast_to(w, (self.kept[j], *w.shape)), seen
        )
        return _Stage(params, state, ring)

    def _updated(
        self,
        stages: list[_Stage],
        rate: Number | None,
        version: jax.Array,
        slots: jax.Array,
        data: MicroBatches,
    ) -> tuple[list[_Stage], jax.Array]:
        """The passes of the micro-batches of one update, and the update."""
        now = [Now(version, own.params, own.state, rate) for own in stages]
        rings = [own.ring for own in stages]
        if self._every == 1:
            one = jax.tree.map(lambda x: x[0], (slots, data))
            seen, loss, grads = self._passes(now, rings, *one)
            losses = loss[None]
        else:
            seen, losses, grads = self._accumulated(now, rings, slots, data)
        after = [self._stepped(j, own, seen[j], grads[j]) for j, own in enumerate(now)]
        moved = [
            _Stage(params, state, _with_slot(ring, (version + 1) % kept, new))
            for (params, state, new), ring, kept in zip(
                after, rings, self.kept, strict=True
            )
        ]
        return moved, losses

    def _accumulated(
        self,
        now: Sequence[Now],
        rings: Sequence[PyTree],
        slots: jax.Array,
        data: MicroBatches,
    ) -> tuple[list[PyTree], jax.Array, list[PyTree]]:
        """`_passes` over the micro-batches of an update, whose mean is the gradient."""
        start = [jax.tree.map(lambda w: -jnp.zeros_like(w), own.params) for own in now]

        def added(sums: list[PyTree], given: Any) -> Any:
            slots, one = given
            seen, loss, grads = self._passes(now, rings, slots, one)
            weighted = reduction.scaled(grads, one.totals)
            return jax.tree.map(jnp.add, sums, weighted), (loss, seen)

        # A loop, and not one sum: the compiler rounds a product and a sum once where it
        # fuses them, which gives other bits than the executor's.
        sums, (losses, seen) = jax.lax.scan(added, start, (slots, data))
        last = jax.tree.map(lambda x: x[-1], seen)
        return last, losses, reduction.divided(sums, jnp.sum(data.totals))

    def _passes(
        self,
        now: Sequence[Now],
        rings: Sequence[PyTree],
        slots: jax.Array,
        one: MicroBatches,
    ) -> tuple[list[PyTree], jax.Array, list[PyTree]]:
        """What a micro-batch sees, its loss, and the gradient of each stage."""
        seen = [_slot(ring, slots[j]) for j, ring in enumerate(rings)]
        value, kept = one.batch[self._input], []
        for part, params in zip(self._segments, seen, strict=True):
            value, residuals = part.forward(params, value)
            # A rebuilt tree forgets which weights it came with, for rules whose
            # backward passes see others.
            kept.append(jax.tree.map(lambda x: x, residuals))
        loss = reduction.partial(
            self._loss_fn, value, dict(one.batch), one.weights, "mean"
        )
        cotangent = loss.gradient.astype(value.dtype)
        grads: list[PyTree] = []
        for j in reversed(range(len(kept))):
            params = self._rules[j].backward(self.places[j], now[j], seen[j])
            grad, (cotangent,) = self._segments[j].backward(params, kept[j], cotangent)
            grads.insert(0, grad)
        return seen, loss.value, grads

    def _stepped(
        self, j: int, now: Now, seen: PyTree, grads: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The next weights of a stage, its state, and what forward passes see of it."""
        rule, place = self._rules[j], self.places[j]
        params, state = rule.step(place, grads, now, seen)
        after = Now(now.version + 1, params, state, now.rate)
        return params, state, rule.forward(place, after)


def stacked(
    batches: Sequence[Mapping[str, np.ndarray]],
    weights: Sequence[np.ndarray] | None = None,
) -> MicroBatches:
    """Stacks micro-batches; shorter ones are padded with examples of weight 0.

    Args:
      batches: Arrays by name, each `(examples, ..)`; the examples may differ.
      weights: `(examples,)` of each, not all 0; None: all are 1.
    """
    sizes = [len(next(iter(batch.values()))) for batch in batches]
    if weights is None:
        weights = [np.ones(size, np.float32) for size in sizes]
    most = max(sizes)
    found = []
    for batch, own in zip(batches, weights, strict=True):
        # An example that counts stands in for the others, whose losses may be 0 / 0.
        order = np.where(own > 0, np.arange(len(own)), np.flatnonzero(own)[0])
        order = np.pad(order, (0, most - len(own)), constant_values=order[0])
        found.append({name: x[order] for name, x in batch.items()})
    padded = np.stack([np.pad(own, (0, most - len(own))) for own in weights])
    wide = padded.astype(np.float64)
    totals = wide.sum(axis=1)
    whole = {name: np.stack([one[name] for one in found]) for name in found[0]}
    shares = (wide / totals[:, None]).astype(padded.dtype)
    return MicroBatches(whole, shares, totals)


def _slot(ring: PyTree, slot: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), ring
    )


def _with_slot(ring: PyTree, slot: jax.Array, new: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, w: jax.lax.dynamic_update_index_in_dim(x, w, slot, 0), ring, new
    )
