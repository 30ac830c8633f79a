"""Orders of a worker's actions: warm-up and alternation, or repeated phases.

Every published schedule has one of two forms. Either a worker has a list of forward
passes and a list of backward passes, starts with some forward passes and then
alternates (`alternating`); or its actions are a sequence of patterns, each repeated a
number of times (`phases`), such as

    F x 3 | I F x 1 | I W F x 5 | I W x 3 | W x 1

where each letter takes the next micro-batch of its kind.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jdist.pipeline.schedule.actions import B, Columns, F, W, WorkerActions
from jdist.pipeline.schedule.schedule import Schedule

Passes = tuple[np.ndarray, np.ndarray]
"""Stages and micro-batches of passes of one kind, in order."""

Phase = tuple[str, int]
"""A pattern of tokens, and the number of its repetitions."""


def alternating(forward: Passes, backward: Passes, warm_up: int) -> WorkerActions:
    """Forward passes ahead, then one forward and one backward pass in turn.

    Args:
      forward: Stages and micro-batches of the forward passes, in order.
      backward: Those of the backward passes; as many.
      warm_up: Forward passes before the first backward pass is due. In any case at
        least one forward pass precedes each backward pass.

    Returns:
      The actions, with whole backward passes.
    """
    count = len(forward[0])
    warm_up = min(warm_up, count)
    # Forward pass k has index k during warm-up; from then on each one is followed by a
    # backward pass: k + (k - warm_up). Backward pass k follows forward pass
    # warm_up + k, or, at the end, the backward pass before it.
    k = np.arange(count)
    at_forward = k + np.maximum(k - warm_up, 0)
    at_backward = np.minimum(warm_up + k + 1, count) + k
    kind = np.empty(2 * count, np.uint8)
    stage = np.empty(2 * count, np.int32)
    micro_batch = np.empty(2 * count, np.int32)
    for number, at, passes in ((F, at_forward, forward), (B, at_backward, backward)):
        kind[at] = number
        stage[at], micro_batch[at] = passes
    return WorkerActions(kind, stage, micro_batch)


def phases(
    patterns: Sequence[Phase], stage_of_chunk: Sequence[int], micro_batches: int
) -> WorkerActions:
    """Patterns one after the other, each repeated.

    A token is a letter and a chunk, the index of one of the worker's stages: F0 is the
    next forward pass of its first stage; B0 the next whole backward pass and I0 the
    next one without weight gradients, both counted together. W, without a chunk, is the
    oldest pending weight gradient. Tokens beyond the last micro-batch are dropped, so
    that patterns for many micro-batches serve for few.

    Args:
      patterns: Tokens separated by blanks, and repetitions; none below 1.
      stage_of_chunk: The worker's stages.
      micro_batches: Number of micro-batches.
    """
    letter, chunk = _expanded(patterns)
    stage = np.asarray(stage_of_chunk, np.int32)[chunk]
    micro_batch = np.zeros(len(letter), np.int32)
    forward, weight = letter == ord("F"), letter == ord("W")
    for own in range(len(stage_of_chunk)):
        for group in (forward, ~forward & ~weight):
            where = np.flatnonzero(group & (chunk == own))
            micro_batch[where] = np.arange(len(where))
    # The k-th W belongs to the k-th I, on whichever stage that is.
    for values in (stage, micro_batch):
        values[weight] = values[letter == ord("I")]
    kind = np.where(forward, F, np.where(weight, W, B)).astype(np.uint8)
    kept = micro_batch < micro_batches
    return WorkerActions(kind[kept], stage[kept], micro_batch[kept])


def _expanded(patterns: Sequence[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """The letter of each token, as its code, and its chunk."""
    letters, chunks = [], []
    for pattern, repeats in patterns:
        tokens, times = pattern.split(), max(repeats, 0)
        letters.append(np.tile(np.array([ord(t[0]) for t in tokens], np.uint8), times))
        chunks.append(np.tile(np.array([int(t[1:] or 0) for t in tokens]), times))
    return np.concatenate(letters), np.concatenate(chunks)


def schedule_of(
    name: str,
    m: int,
    workers: Iterable[int],
    programs: Sequence[WorkerActions],
    family: Callable[[int], Schedule],
) -> Schedule:
    """A synchronous schedule whose stages have one worker each.

    Args:
      name: Name of the family.
      m: Micro-batches.
      workers: The worker of each stage.
      programs: The actions of each worker.
      family: See `Schedule`.
    """
    placement = tuple((worker,) for worker in workers)
    return Schedule(name, m, placement, Columns.joined(programs), family=family)
