"""The memory that the workers of a schedule hold between two actions.

    F              takes the stage's activations for the micro-batch
    B              gives them back
    B before a W   gives them back and leaves what W needs: the activations that enter
                   gradients of parameters, and the cotangents of what these made
    W              gives that back

A stage that joins its weight gradients leaves what they need at every B, and gives all
of it back after its last backward pass before an update.

There are two units. In bytes, each stage has sizes of its own (`Costs`). Without sizes,
one stage's activations for one micro-batch count as 1 and a pending weight gradient as
2: its activations and as many cotangents, which is what a stack of matrix products
keeps. The literature on zero bubbles calls these M_B and M_W and compares schedules by
the number of micro-batches between F and W, which assumes that M_W is at most M_B.
"""

from collections.abc import Sequence

import numpy as np

from jdist.pipeline.schedule.actions import B, Columns, F, W

PENDING = 2
"""Size of a pending weight gradient, in activations of its stage and micro-batch."""


def held(
    columns: Columns,
    activation: np.ndarray | float = 1,
    pending: np.ndarray | float = PENDING,
    joined: Sequence[bool] = (),
    every: int | None = None,
) -> np.ndarray:
    """The amount that an action's worker holds after the action.

    Args:
      columns: The actions.
      activation: For each action, the activations of its stage for its micro-batch.
      pending: For each action, what its stage keeps for its weight gradient.
      joined: For each stage, whether it joins weight gradients; empty: none does.
      every: Backward passes of a worker per update of its stage; None: all of them.

    Returns:
      float64, one per action.
    """
    shape = (columns.stage.max(initial=0) + 1, columns.micro_batch.max(initial=0) + 1)
    # Whether a W follows is known only from the whole schedule.
    split = (columns.index_of(W, *shape) >= 0)[columns.stage, columns.micro_batch]
    forward, backward = columns.kind == F, columns.kind == B
    none = np.zeros(columns.stage.shape, bool)
    joins = np.asarray(joined, bool)[columns.stage] if any(joined) else none
    change = np.where(forward, activation, 0.0)
    change -= np.where(backward, activation, 0.0)
    change += np.where(backward & (split | joins), pending, 0.0)
    change -= np.where((columns.kind == W) & ~joins, pending, 0.0)
    if any(joined):
        left = np.where(backward & joins, pending, 0.0)
        done = joins & np.where(split, columns.kind == W, backward)
        change -= _given_back_together(columns, left, done, every)
    total = np.concatenate([[0.0], np.cumsum(change)])
    # The running sum goes over all workers: subtract its value at the worker's start.
    begin = np.repeat(columns.first[:-1], np.diff(columns.first))
    return total[1:] - total[begin]


def peaks(columns: Columns, amount: np.ndarray) -> np.ndarray:
    """The maximum of each worker; 0 for one without actions.

    Args:
      columns: The actions.
      amount: One per action.
    """
    found = np.zeros(columns.workers)
    # `reduceat` would return a neighbour's number for an empty span.
    busy = np.diff(columns.first) > 0
    if busy.any():
        found[busy] = np.maximum.reduceat(amount, columns.first[:-1][busy])
    # A broken schedule may give back more than it took.
    return np.maximum(found, 0)


def peak_activations(
    columns: Columns, joined: Sequence[bool] = (), every: int | None = None
) -> tuple[int, ...]:
    """Per worker, the most held, in activations of one stage for one micro-batch.

    Args:
      columns: The actions.
      joined: As for `held`.
      every: As for `held`.
    """
    most = peaks(columns, held(columns, joined=joined, every=every))
    return tuple(most.astype(int).tolist())


def peak_in_flight(columns: Columns) -> tuple[int, ...]:
    """Per worker, the most (stage, micro-batch) pairs between F and B."""
    return tuple(peaks(columns, held(columns, 1, 0)).astype(int).tolist())


def _given_back_together(
    columns: Columns, left: np.ndarray, done: np.ndarray, every: int | None
) -> np.ndarray:
    """The amounts given back by joined weight gradients, at each update's last action.

    Args:
      columns: The actions.
      left: The amount that each action leaves for a joined gradient.
      done: Whether an action is the last of its micro-batch at a stage that joins.
      every: As for `held`.
    """
    found = np.zeros(len(columns))
    stages = int(columns.stage.max()) + 1
    place = columns.worker_of_each().astype(np.int64) * stages + columns.stage
    for own in np.unique(place[done]):
        ends = np.flatnonzero(done & (place == own))
        begins = np.flatnonzero((place == own) & (columns.kind == B))
        # The last update of an epoch may have fewer micro-batches than the others.
        step = every or len(ends)
        for start in range(0, len(ends), step):
            update = slice(start, start + step)
            found[ends[update][-1]] = left[begins[update]].sum()
    return found
