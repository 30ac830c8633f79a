"""Asynchronous epochs as one compiled program: a scan over micro-batches.

What a micro-batch meets at each stage is a matrix of version numbers, and follows from
the order of actions alone. The program goes through the micro-batches one after the
other, and looks up the versions that each meets in rings: a stage keeps as many as its
largest delay needs. Passes are the halves that a `Pipeline` runs, cut by
`jdist.segment`, so that the results have the same bits as those of its executor.

Replicas of a stage hold equal weights and take micro-batches in turn: they are one
stage here, whose update takes the micro-batches of all of them.

Thousands of runs take one compilation: `jax.vmap` maps the program over seeds, and a
`VersionOrder` of other versions or fewer stages may be an argument of what is compiled.
"""

import copy
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


class VersionOrder(NamedTuple):
    """The versions of an epoch: what a compiled program may be given.

    Attributes:
      slots: Where each micro-batch finds its version in each ring, int32,
        `(micro-batches, stages)`.
      places: The stages as rules see them.
    """

    slots: Any
    places: list[Place]


class Trained(NamedTuple):
    """The end of an epoch.

    Attributes:
      params: The newest weights of each stage.
      states: What each rule keeps beside them.
      losses: Of each micro-batch, at the weights that it met, `(micro-batches,)`.
    """

    params: list[PyTree]
    states: list[PyTree]
    losses: jax.Array


class _Stage(NamedTuple):
    """What the scan carries of a stage.

    Attributes:
      params: The newest weights.
      state: The rule's.
      ring: What forward passes see of the versions that are kept.
      sums: Of the gradients since the last update, and their weight; None if each
        micro-batch has an update.
    """

    params: PyTree
    state: PyTree
    ring: PyTree
    sums: tuple[PyTree, jax.Array] | None


class Program:
    """An epoch under a rule and a version matrix, as one function to compile.

    Args:
      stages: Stages of one input and one output; the batch has the first input.
      loss_fn: As for `pipeline.Pipeline`; the reduction is the mean.
      rule: The rule of every stage; or one for each.
      versions: The version that each micro-batch meets, `(stages, micro-batches)`; see
        `Schedule.versions_used`.
      every: Micro-batches of an update, at every stage or at each; their number is a
        multiple of it. At a stage of r replicas r times those of a replica.

    Attributes:
      places: The stages, with their delays.
      kept: The number of versions that each stage's ring has.

    Raises:
      ValueError: The micro-batches are no multiple of `every`; a version is not made
        yet when it is met; or `rule` or `every` is not one for each stage.
    """

    def __init__(
        self,
        stages: Sequence[pipeline.Stage],
        loss_fn: Callable[..., jax.Array],
        rule: Rule | Sequence[Rule],
        versions: np.ndarray,
        every: int | Sequence[int] = 1,
    ) -> None:
        n, m = versions.shape
        self._rules = [rule] * n if isinstance(rule, Rule) else list(rule)
        self._every = [every] * n if isinstance(every, int) else list(every)
        if not len(self._rules) == len(self._every) == len(stages) == n:
            got = f"{len(self._rules)} rules, {len(self._every)} numbers, "
            got += f"{len(stages)} stages, {n} rows"
            raise ValueError(f"rule and every must be one, or one a stage: {got}")
        if any(m % own for own in self._every):
            raise ValueError(f"{m} micro-batches must be a multiple of every={every}")
        self.kept = tuple((self._lags(versions) + 1).tolist())
        self._slots, self.places = self.order_of(versions)
        self._segments = [segment.segment(stage.fn) for stage in stages]
        self._input = stages[0].inputs[0]
        self._loss_fn = loss_fn

    def _lags(self, versions: np.ndarray) -> np.ndarray:
        """The largest delay of each stage, in updates."""
        made = np.arange(versions.shape[1]) // np.array(self._every)[:, None]
        lags = made - versions
        if lags.min() < 0:
            stage, micro = np.argwhere(lags < 0)[0]
            got = f"stage {stage}, micro-batch {micro}, "
            got += f"version {versions[stage, micro]}"
            raise ValueError(f"versions must be made when they are met: {got}")
        return lags.max(axis=1)

    def order_of(self, versions: np.ndarray) -> VersionOrder:
        """Other versions for this program, of as many stages or of fewer.

        Args:
          versions: As for the program. A row stands for as many neighbouring stages as
            there are for each: all of them have its delay.

        Raises:
          ValueError: The rows do not divide the stages; or a ring keeps too few.
        """
        share, rest = divmod(len(self._rules), len(versions))
        if rest:
            got = f"{len(versions)} rows, {len(self._rules)} stages"
            raise ValueError(f"rows of versions must divide the stages: {got}")
        rows = np.repeat(versions, share, axis=0)
        lags, kept = self._lags(rows), np.array(self.kept)
        if (lags >= kept).any():
            stage = int(np.argmax(lags >= kept))
            got = f"stage {stage} keeps {kept[stage]}, delay {lags[stage]}"
            raise ValueError(f"rings must keep one version more than the delay: {got}")
        places = [
            Place(j // share, len(versions), lag) for j, lag in enumerate(lags.tolist())
        ]
        return VersionOrder((rows.T % kept).astype(np.int32), places)

    def with_order(self, order: VersionOrder) -> "Program":
        """This program with other versions, which may be traced; see `order_of`."""
        other = copy.copy(self)
        other._slots, other.places = order
        return other

    def __call__(
        self,
        params: Sequence[PyTree],
        data: MicroBatches,
        rate: Number | None = None,
        states: Sequence[PyTree] | None = None,
    ) -> Trained:
        """Trains one epoch; pure, so that it can be jitted and mapped.

        Args:
          params: The weights of each stage.
          data: As many micro-batches as the version matrix has.
          rate: The learning rate; None: that of the rule's optimizer.
          states: What the rules keep at the beginning; None: as in the first epoch.
        """
        if states is None:
            pairs = zip(self._rules, params, strict=True)
            states = [rule.begin(own) for rule, own in pairs]
        begun = [
            self._begun(j, *own, rate, jnp.asarray(data.totals).dtype)
            for j, own in enumerate(zip(params, states, strict=True))
        ]
        numbers = jnp.arange(len(self._slots), dtype=jnp.int32)

        def advance(stages: list[_Stage], given: Any) -> Any:
            return self._advanced(stages, rate, *given)

        steps = numbers, jnp.asarray(self._slots), data
        ended, losses = jax.lax.scan(advance, begun, steps)
        params, states = ([own[k] for own in ended] for k in range(2))
        return Trained(params, states, losses)

    def _begun(
        self, j: int, params: PyTree, state: PyTree, rate: Number | None, dtype: Any
    ) -> _Stage:
        now = Now(jnp.int32(0), params, state, rate)
        seen = self._rules[j].forward(self.places[j], now)
        # Version 0 in all places: whichever is read before the first update is it.
        ring = jax.tree.map(
            lambda w: jnp.broadcast_to(w, (self.kept[j], *w.shape)), seen
        )
        sums = None if self._every[j] == 1 else _empty(params, dtype)
        return _Stage(params, state, ring, sums)

    def _advanced(
        self,
        stages: list[_Stage],
        rate: Number | None,
        number: jax.Array,
        slots: jax.Array,
        one: MicroBatches,
    ) -> tuple[list[_Stage], jax.Array]:
        """The passes of a micro-batch, and the updates that follow them."""
        now = [
            Now(number // every, own.params, own.state, rate)
            for own, every in zip(stages, self._every, strict=True)
        ]
        rings = [own.ring for own in stages]
        seen, loss, grads = self._passes(now, rings, slots, one)
        ended = [
            self._added(j, own, now[j], seen[j], grads[j], one.totals, number)
            for j, own in enumerate(stages)
        ]
        return ended, loss

    def _added(
        self,
        j: int,
        stage: _Stage,
        now: Now,
        seen: PyTree,
        grads: PyTree,
        weight: jax.Array,
        number: jax.Array,
    ) -> _Stage:
        """A stage with one gradient more, and after its update if that was the last."""
        if stage.sums is None:
            return self._updated(j, stage, now, seen, grads)
        sums, total = stage.sums
        sums = jax.tree.map(jnp.add, sums, reduction.scaled(grads, weight))
        total = total + weight

        def updated() -> _Stage:
            mean = reduction.divided(sums, total)
            after = self._updated(j, stage, now, seen, mean)
            return after._replace(sums=_empty(now.params, total.dtype))

        every = self._every[j]
        return jax.lax.cond(
            (number + 1) % every == 0,
            updated,
            lambda: stage._replace(sums=(sums, total)),
        )

    def _updated(
        self, j: int, stage: _Stage, now: Now, seen: PyTree, grads: PyTree
    ) -> _Stage:
        rule, place = self._rules[j], self.places[j]
        params, state = rule.step(place, grads, now, seen)
        version = now.version + 1
        new = rule.forward(place, Now(version, params, state, now.rate))
        ring = _with_slot(stage.ring, version % self.kept[j], new)
        return _Stage(params, state, ring, stage.sums)

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


def _empty(params: PyTree, dtype: Any) -> tuple[PyTree, jax.Array]:
    # -0, which added to -0 is -0: the sum of one gradient is that gradient.
    sums = jax.tree.map(lambda w: -jnp.zeros_like(w), params)
    return sums, jnp.zeros((), dtype)


def _slot(ring: PyTree, slot: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), ring
    )


def _with_slot(ring: PyTree, slot: jax.Array, new: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, w: jax.lax.dynamic_update_index_in_dim(x, w, slot, 0), ring, new
    )
