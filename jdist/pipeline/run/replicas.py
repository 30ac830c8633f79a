"""Reduction of gradients and states over the workers that share a stage.

After its last backward pass of a stage a worker sends its sum of gradients to the
stage's other workers, and continues with other stages.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jdist._tree import PyTree, is_inexact, wide_dtype
from jdist.pipeline.run.stage_channels import MessageTag, Places, ValueChannels, receive
from jdist.pipeline.run.stage_run import StageRun
from jdist.reduction import Partial


def share_gradient(
    channels: ValueChannels, places: Places, worker: int, stage: int, own: Partial
) -> None:
    """Sends a worker's gradient of a stage to the stage's other workers."""
    for other in places.replicas(worker, stage):
        channels.put(_sum_of(worker, stage), other, _flat(own))


def joined_gradient(
    channels: ValueChannels, places: Places, worker: int, stage: int, run: StageRun
) -> Partial:
    """Sums the gradients that all workers of a stage have sent.

    Args:
      channels: The channels to the other workers.
      places: The worker of each stage and micro-batch.
      worker: One of this process.
      stage: The stage.
      run: The stage on this worker.
    """
    own = run.partial()
    found = {worker: _flat(own)}
    for other in places.replicas(worker, stage):
        tag = _sum_of(other, stage)
        found[other] = receive(channels, tag, worker, "the end of the step")
    joined, structure = run.joined(found), jax.tree.structure(own.gradient)
    return joined._replace(gradient=jax.tree.unflatten(structure, joined.gradient))


def _flat(partial: Partial) -> Partial:
    """A partial for a message, with the leaves of its gradient."""
    # Not the tree, whose classes a message may not carry.
    return partial._replace(gradient=jax.tree.leaves(partial.gradient))


def _sum_of(worker: int, stage: int) -> MessageTag:
    return MessageTag("G", -1, "", stage, worker)


def joined_states(
    channels: ValueChannels,
    places: Places,
    runs: Mapping[tuple[int, int], StageRun],
    totals: Sequence[float],
) -> list[PyTree]:
    """Joins the states of this process's stages over all workers, after a step.

    None for stages that have none, and for those of other processes.

    Args:
      channels: The channels to the other workers.
      places: The worker of each stage and micro-batch.
      runs: The stages of this process, by worker and stage.
      totals: The sum of the weights of each micro-batch.
    """
    # All are sent before any is received, or two workers would wait for each other.
    for (worker, stage), run in runs.items():
        if run.state is not None:
            for other in places.replicas(worker, stage):
                channels.put(_state_of(worker, stage), other, run.state)
    found: list[PyTree] = [None] * places.loss
    for stage, worker in places.stages.items():
        states = {worker: runs[worker, stage].state}
        if states[worker] is not None:
            for other in places.replicas(worker, stage):
                tag = _state_of(other, stage)
                states[other] = receive(channels, tag, worker, "the end of the step")
        # A worker's state counts by the weights of the examples that it has seen.
        weights = dict.fromkeys(states, 0.0)
        for micro, total in enumerate(totals if len(states) > 1 else ()):
            weights[places.worker(stage, micro)] += float(total)
        # In the order of ranks, so that all workers get the same bits.
        ranks = sorted(states)
        each = [states[rank] for rank in ranks], [weights[rank] for rank in ranks]
        found[stage] = joined_state(*each) if len(ranks) > 1 else states[worker]
    return found


def _state_of(worker: int, stage: int) -> MessageTag:
    return MessageTag("G", -1, "state", stage, worker)


def joined_state(states: Sequence[PyTree], weights: Sequence[float]) -> PyTree:
    """The weighted mean of states, by the rule of `data_parallel`.

    Args:
      states: Trees of one structure, on one device, in the order of ranks.
      weights: Sums of the weights of the examples of each worker. If all are 0, the
        first state is returned.

    Returns:
      A tree like each: floating leaves are the weighted mean, other leaves those of the
      first worker with a positive weight.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = {"mean": jnp.array([1.0]), "seen": jnp.int32(3)}
      >>> others = {"mean": jnp.array([5.0]), "seen": jnp.int32(1)}
      >>> joined_state([ones, others], [3.0, 1.0])
      {'mean': Array([2.], dtype=float32), 'seen': Array(3, dtype=int32)}
    """
    # A state of weight 0 may hold NaN, which a factor of 0 would not remove.
    pairs = [(s, w) for s, w in zip(states, weights, strict=True) if w > 0]
    kept, shares = zip(*pairs or [(states[0], 1.0)], strict=True)
    total = sum(shares)
    # Python's numbers, because in single precision the shares of a float64 state would
    # not add up to 1.
    return _mean(list(kept), [share / total for share in shares])


@jax.jit
def _mean(states: list[PyTree], shares: list[float]) -> PyTree:
    def mean(*leaves: jax.Array) -> jax.Array:
        if len(leaves) == 1 or not is_inexact(leaves[0]):
            return leaves[0]
        # Added in a wide dtype and rounded once.
        wide = wide_dtype(leaves[0].dtype)
        parts = [
            leaf.astype(wide) * jnp.asarray(share, wide)
            for leaf, share in zip(leaves, shares, strict=True)
        ]
        return sum(parts[1:], parts[0]).astype(leaves[0].dtype)

    return jax.tree.map(mean, *states)
