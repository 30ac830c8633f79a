"""The memory that the workers of a schedule hold between two actions.

    F              takes the stage's activations for the micro-batch
    B              gives them back
    B before a W   gives them back and leaves what W needs: the activations that enter
                   gradients of parameters, and the cotangents of what these made
    W              gives that back

There are two units. In bytes, each stage has sizes of its own (`Costs`). Without sizes,
one stage's activations for one micro-batch count as 1 and a pending weight gradient as
2: its activations and as many cotangents, which is what a stack of matrix products
keeps. The literature on zero bubbles calls these M_B and M_W and compares schedules by
the number of micro-batches between F and W, which assumes that M_W is at most M_B.
"""

import numpy as np

from jdist.pipeline.schedule.actions import B, Columns, F, W

PENDING = 2
"""Size of a pending weight gradient, in activations of its stage and micro-batch."""


def held(
    columns: Columns,
    activation: np.ndarray | float = 1,
    pending: np.ndarray | float = PENDING,
) -> np.ndarray:
    """The amount that an action's worker holds after the action.

    Args:
      columns: The actions.
      activation: For each action, the activations of its stage for its micro-batch.
      pending: For each action, what its stage keeps for its weight gradient.

    Returns:
      float64, one per action.
    """
    shape = (columns.stage.max(initial=0) + 1, columns.micro_batch.max(initial=0) + 1)
    # Whether a W follows is known only from the whole schedule.
    split = (columns.index_of(W, *shape) >= 0)[columns.stage, columns.micro_batch]
    forward, backward = columns.kind == F, columns.kind == B
    change = np.where(forward, activation, 0.0)
    change -= np.where(backward, activation, 0.0)
    change += np.where(backward & split, pending, 0.0)
    change -= np.where(columns.kind == W, pending, 0.0)
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


def peak_activations(columns: Columns) -> tuple[int, ...]:
    """Per worker, the most held, in activations of one stage for one micro-batch."""
    return tuple(peaks(columns, held(columns)).astype(int).tolist())


def peak_in_flight(columns: Columns) -> tuple[int, ...]:
    """Per worker, the most (stage, micro-batch) pairs between F and B."""
    return tuple(peaks(columns, held(columns, 1, 0)).astype(int).tolist())
