"""How a schedule's order is written down: warm-up and alternation, or phases.

Every published schedule is one of two forms. Either a worker has a list of forward
passes and a list of backward passes, does some of the first and then alternates
(`alternating`); or its program is a sequence of patterns, each repeated so many times
(`phases`), such as

    F x 3 | I F x 1 | I W F x 5 | I W x 3 | W x 1

where each letter takes the next micro-batch of its kind.
"""

from collections.abc import Sequence

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import B, F, Program, W

Sequenced = tuple[np.ndarray, np.ndarray]
"""Stages and micro-batches, in order."""

Phase = tuple[str, int]
"""A pattern of tokens, and how often it is repeated."""


def check_counts(call: str, least: int = 1, **counts: int) -> None:
    """Refuses what is not an integer of at least `least`.

    Raises:
      ValueError: Names the argument and what was given.
    """
    for name, value in counts.items():
        integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not integer or value < least:
            rule = f"must be an integer of at least {least}"
            raise ValueError(requirement(f"{call}({name}=...)", rule, value))


def alternating(forward: Sequenced, backward: Sequenced, warm_up: int) -> Program:
    """Some forward passes, then one forward and one backward in turn, then the rest.

    Args:
      forward: Stages and micro-batches of the forward passes, in order.
      backward: Of the backward passes; as many.
      warm_up: Forward passes before the first backward pass is due; at least one
        forward pass comes before each backward pass in any case.

    Returns:
      The program, with whole backward passes.
    """
    count = len(forward[0])
    warm_up = min(warm_up, count)
    # Forward pass k is number k during warm-up; from then on each one is followed by a
    # backward pass: k + (k - warm_up). Backward pass k follows forward pass
    # warm_up + k, or, at the end, the backward pass before it.
    k = np.arange(count)
    at_forward = k + np.maximum(k - warm_up, 0)
    at_backward = np.minimum(warm_up + k + 1, count) + k
    kind = np.empty(2 * count, np.uint8)
    stage = np.empty(2 * count, np.int32)
    micro_batch = np.empty(2 * count, np.int32)
    for number, at, taken in ((F, at_forward, forward), (B, at_backward, backward)):
        kind[at] = number
        stage[at], micro_batch[at] = taken
    return Program(kind, stage, micro_batch)


def phases(
    patterns: Sequence[Phase], stage_of_chunk: Sequence[int], micro_batches: int
) -> Program:
    """Patterns one after the other, each repeated.

    A token is a letter and the chunk, that is, which of the worker's stages: F0 is its
    first stage's next forward pass; B0 the next whole backward pass, I0 the next one
    without weight gradients, both counted together. W, without a chunk, is the oldest
    weight gradient that is due. Tokens beyond the last micro-batch are left out, which
    is how a schedule made for many micro-batches serves a few.

    Args:
      patterns: Tokens with blanks between, and repeats; none for repeats below 1.
      stage_of_chunk: The worker's stages.
      micro_batches: Their number.
    """
    letter, chunk = _expanded(patterns)
    stage = np.asarray(stage_of_chunk, np.int32)[chunk]
    micro_batch = np.zeros(len(letter), np.int32)
    forward, weight = letter == ord("F"), letter == ord("W")
    for own in range(len(stage_of_chunk)):
        for group in (forward, ~forward & ~weight):
            where = np.flatnonzero(group & (chunk == own))
            micro_batch[where] = np.arange(len(where))
    for values in (stage, micro_batch):
        values[weight] = values[letter == ord("I")]
    kind = np.where(forward, F, np.where(weight, W, B)).astype(np.uint8)
    kept = micro_batch < micro_batches
    return Program(kind[kept], stage[kept], micro_batch[kept])


def _expanded(patterns: Sequence[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """The letter of each token, as its code, and the chunk."""
    letters, chunks = [], []
    for pattern, repeats in patterns:
        tokens, times = pattern.split(), max(repeats, 0)
        letters.append(np.tile(np.array([ord(t[0]) for t in tokens], np.uint8), times))
        chunks.append(np.tile(np.array([int(t[1:] or 0) for t in tokens]), times))
    return np.concatenate(letters), np.concatenate(chunks)
