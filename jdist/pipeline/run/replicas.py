"""Workers that share a stage: one gradient and one state of what each of them has.

When a worker's last backward pass of a stage is done, its sum leaves for the stage's
other workers in several messages, while the worker goes on with other stages. Each
bucket is added up as soon as all workers' are there; the next ones are still under way.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jdist._tree import PyTree, is_inexact, wide_dtype
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    Places,
    ValueChannels,
    receive,
)
from jdist.pipeline.run.stage_run import StageRun
from jdist.reduction import Partial

# As in torch's `DistributedDataParallel`.
LIMIT = 25 * 2**20
"""Bytes from which on a bucket is closed."""


def buckets_of(partial: Partial) -> list[Partial]:
    """The partial, with some leaves of its gradient in each bucket, in their order.

    A bucket is closed when it holds `LIMIT` bytes or more. There is one at least.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
      >>> [len(b.gradient) for b in buckets_of(Partial(1.0, gradient, 4.0))]
      [2]
    """
    found: list[list[jax.Array]] = [[]]
    held = 0
    for leaf in jax.tree.leaves(partial.gradient):
        if held >= LIMIT:
            found.append([])
            held = 0
        found[-1].append(leaf)
        held += leaf.nbytes
    return [partial._replace(gradient=leaves) for leaves in found]


def whole(buckets: Sequence[Partial], like: Partial) -> Partial:
    """The inverse of `buckets_of`, with the structure of `like`."""
    leaves = itertools.chain.from_iterable(bucket.gradient for bucket in buckets)
    structure = jax.tree.structure(like.gradient)
    return buckets[0]._replace(gradient=jax.tree.unflatten(structure, leaves))


def share_gradient(
    channels: ValueChannels, places: Places, worker: int, stage: int, own: Partial
) -> None:
    """Sends a worker's gradient of a stage to the stage's other workers."""
    for number, bucket in enumerate(buckets_of(own)):
        for other in places.replicas(worker, stage):
            channels.put(MessageTag("G", number, "", stage, worker), other, bucket)


def joined_gradient(
    channels: ValueChannels, places: Places, worker: int, stage: int, run: StageRun
) -> Partial:
    """The gradient of a stage over all its workers, of which each has shared its own.

    Args:
      channels: Bring the gradients.
      places: The worker of each stage and micro-batch.
      worker: One of this process.
      stage: The stage.
      run: The stage on this worker.
    """
    own, sums = run.partial(), []
    for number, bucket in enumerate(buckets_of(own)):
        found = {worker: bucket}
        for other in places.replicas(worker, stage):
            tag = MessageTag("G", number, "", stage, other)
            found[other] = receive(channels, tag, worker, "the end of the step")
        # While it is computed, the next bucket's messages arrive.
        sums.append(run.joined(found))
    return whole(sums, own)


def joined_states(
    channels: ValueChannels,
    places: Places,
    runs: Mapping[tuple[int, int], StageRun],
    totals: Sequence[float],
) -> dict[int, PyTree]:
    """The states of this process's stages at the end of a step, over all workers.

    Args:
      channels: Bring the states of other workers.
      places: The worker of each stage and micro-batch.
      runs: By worker and stage, of the workers of this process.
      totals: The sum of the weights of each micro-batch.
    """
    for (worker, stage), run in runs.items():
        if run.state is not None:
            for other in places.replicas(worker, stage):
                channels.put(_state_of(worker, stage), other, run.state)
    found: dict[int, PyTree] = {}
    for stage, worker in places.stages.items():
        states = {worker: runs[worker, stage].state}
        if states[worker] is not None:
            for other in places.replicas(worker, stage):
                tag = _state_of(other, stage)
                states[other] = receive(channels, tag, worker, "the end of the step")
        # By the examples that each worker's micro-batches had.
        weights = dict.fromkeys(states, 0.0)
        for micro, total in enumerate(totals if len(states) > 1 else ()):
            weights[places.worker(stage, micro)] += float(total)
        ranks = sorted(states)
        found[stage] = states[worker]
        if len(ranks) > 1:
            found[stage] = joined_state(
                [states[rank] for rank in ranks], [weights[rank] for rank in ranks]
            )
    return found


def _state_of(worker: int, stage: int) -> MessageTag:
    return MessageTag("G", -1, "state", stage, worker)


def joined_state(states: Sequence[PyTree], weights: Sequence[float]) -> PyTree:
    """The states' mean, as `data_parallel` forms that of its replicas.

    Args:
      states: Trees of one structure, on one device: by the rank of their workers.
      weights: Of the examples that each worker's micro-batches had. If all are 0, the
        first state is returned.

    Returns:
      A tree like each: floating leaves are the mean, in proportion to the weights, and
      other leaves those of the first worker with a positive weight.

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
    return _mean(list(kept), [jnp.float32(share / total) for share in shares])


@jax.jit
def _mean(states: list[PyTree], shares: list[jax.Array]) -> PyTree:
    def mean(*leaves: jax.Array) -> jax.Array:
        if len(leaves) == 1 or not is_inexact(leaves[0]):
            return leaves[0]
        wide = wide_dtype(leaves[0].dtype)
        parts = [
            leaf.astype(wide) * share.astype(wide)
            for leaf, share in zip(leaves, shares, strict=True)
        ]
        return sum(parts[1:], parts[0]).astype(leaves[0].dtype)

    return jax.tree.map(mean, *states)
