"""Interleaved 1F1B: several stages per worker, for a smaller bubble."""

from functools import partial

import numpy as np

from jdist._errors import value_error
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.patterns import Passes, alternating, schedule_of
from jdist.pipeline.schedule.schedule import Schedule


def interleaved(n: int, m: int, chunks: int) -> Schedule:
    """1F1B over n workers with `chunks` stages each: stages j, n + j, 2n + j, ...

    A worker takes a round of r micro-batches through one of its stages, then the same
    round through its next stage. The bubble is that of 1F1B divided by `chunks`, for
    `chunks` times the messages.

    Args:
      n: Workers.
      m: Micro-batches, in m // n rounds of equal size (at least one round).
      chunks: Stages per worker.

    Raises:
      ValueError: A number is below 1, or m is not a multiple of the number of rounds.

    Source:
      Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
      Using Megatron-LM, SC 2021, 2.2.

    Example:
      >>> print(interleaved(2, 2, chunks=2))
      worker 0 | 0F0 0F1 2F0 2F1  .  2B0  .  2B1 0B0 0B1
      worker 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1  .
    """
    check_counts("interleaved", n=n, m=m, chunks=chunks)
    # `_order` computes with one size for all rounds.
    rounds = max(1, m // n)
    if m % rounds:
        rule = f"must be a multiple of its {rounds} rounds of at least {n} workers"
        remedy = f"A multiple of {n}, or fewer than {2 * n}, always is."
        raise value_error("interleaved(m=...)", rule, m, remedy)
    size = m // rounds
    programs = [
        alternating(
            _order(n, m, chunks, size, rank),
            _order(n, m, chunks, size, rank, backward=True),
            # Megatron's: the round trip to the last worker, and a round for each chunk
            # but one.
            warm_up=2 * (n - rank - 1) + (chunks - 1) * size,
        )
        for rank in range(n)
    ]
    family = partial(interleaved, n, chunks=chunks)
    return schedule_of("interleaved 1F1B", m, [*range(n)] * chunks, programs, family)


def _order(
    n: int, m: int, chunks: int, size: int, rank: int, backward: bool = False
) -> Passes:
    k = np.arange(m * chunks)
    # k counts a worker's passes: through all chunks of a round, then the next round.
    chunk = k // size % chunks
    micro_batch = k // (size * chunks) * size + k % size
    if backward:
        chunk = chunks - 1 - chunk
    return chunk * n + rank, micro_batch
