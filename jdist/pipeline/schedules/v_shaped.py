"""V-Half and V-Min: a building block whose offsets decide the memory.

Worker j has stages j and 2n - 1 - j, so that a micro-batch goes along the workers and
back, and its cotangents likewise. The building block is the start of each of a micro-
batch's six actions on each worker; it is repeated every 6 clocks. With `lag` clocks
from worker to worker on the way out, 1 on the way back, the two stages of any worker
keep a micro-batch for some 2 (n - 1)(lag + 1) clocks in all, so that
(n - 1)(lag + 1) / 3 of these half-size stages are in flight: a third of 1F1B's 2n with
a lag of 1, a half with 2, and all with 5, which is V-ZB (`zbv`).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jdist.pipeline.schedule.actions import (
    B,
    F,
    W,
    WorkerActions,
    check_counts,
)
from jdist.pipeline.schedule.patterns import schedule_of
from jdist.pipeline.schedule.schedule import Schedule


def v_half(n: int, m: int) -> Schedule:
    """V-Half for n workers with stages j and 2n - 1 - j each, and m micro-batches.

    From F to W a worker keeps at most 2 floor((n + 2) / 2) of these half-size stages,
    half of 1F1B's 2n and up to 2 more. If F, B and W take equally long, it is idle for
    7 (n - 1) / 2 of their clocks, or 7n / 2 - 2 if n is even, where 1F1B is idle for
    6 (n - 1).

    Raises:
      ValueError: A number is below 1.

    Source:
      Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024; the
      building block as it is, without the reordering of warm-up and drain.

    Example:
      >>> print(v_half(2, 1))
      worker 0 | 0F0  .   .  3F0 3B0 3W0  .   .  0B0 0W0
      worker 1 |  .  1F0 2F0  .   .  2B0 2W0 1B0 1W0  .
    """
    check_counts("v_half", n=n, m=m)
    even = 1 - n % 2
    # Without 3 clocks more at the turn, actions of even n would coincide.
    programs = [_worker(n, m, j, 2, (1, 1 + 3 * even, 2)) for j in range(n)]
    return v_schedule("V-Half", m, programs, partial(v_half, n))


def v_min(n: int, m: int) -> Schedule:
    """V-Min for n workers with stages j and 2n - 1 - j each, and m micro-batches.

    From F to W a worker keeps at most 2 floor((n + 4) / 3) of these half-size stages, a
    third of 1F1B's 2n and up to 8/3 more. If F, B and W take equally long, it is idle
    for 4n - 5 of their clocks, or 4n - 3 if n is a multiple of 3, where 1F1B is idle
    for 6 (n - 1). If they do not, workers wait for each other in every block.

    Raises:
      ValueError: A number is below 1.

    Source:
      Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024; the
      building block as it is, without the reordering of warm-up and drain.

    Example:
      >>> print(v_min(2, 2))
      worker 0 | 0F0  .   .  3F0 3B0 3W0 0F1 0B0 0W0 3F1 3B1 3W1  .  0B1 0W1
      worker 1 |  .  1F0 2F0  .   .  2B0 1B0 1F1 2F1 2W0 1W0 2B1 1B1 2W1 1W1
    """
    check_counts("v_min", n=n, m=m)
    triple = int(n % 3 == 0)
    # Without 2 clocks more at the turn, actions of n = 3, 6 .. would coincide.
    programs = [_worker(n, m, j, 1, (1, 1 + 2 * triple, 1)) for j in range(n)]
    return v_schedule("V-Min", m, programs, partial(v_min, n))


def _worker(
    n: int, m: int, j: int, lag: int, turns: tuple[int, int, int]
) -> WorkerActions:
    """The building blocks of worker j.

    Args:
      n: Workers.
      m: Micro-batches.
      j: The worker.
      lag: Clocks from worker to worker on the way out.
      turns: Clocks from pass to pass on the worker where a micro-batch turns: the last
        one, the first, and the last again.
    """
    first, last = j, 2 * n - 1 - j
    # At worker 0: its second F, its first B; on the way back one clock per worker.
    forward = (lag + 1) * (n - 1) + turns[0]
    backward = forward + turns[1]
    passes = [
        lag * j,
        forward - j,
        backward + lag * j,
        backward + forward - turns[0] + turns[2] - j,
    ]
    # The two clocks of a block that are left are those of W.
    left = [clock for clock in range(6) if clock not in {p % 6 for p in passes}]
    wait, own = min(((clock - passes[2]) % 6, clock) for clock in left)
    other = next(clock for clock in left if clock != own)
    weights = [passes[2] + wait, passes[3] + (other - passes[3]) % 6]
    starts = np.add.outer(6 * np.arange(m), [*passes, *weights]).ravel()
    order = np.argsort(starts)
    kinds = np.tile(np.array([F, F, B, B, W, W], np.uint8), m)
    stages = np.tile([first, last, last, first, last, first], m)
    return WorkerActions(kinds[order], stages[order], order // 6)


def v_schedule(
    name: str,
    m: int,
    programs: Sequence[WorkerActions],
    family: Callable[[int], Schedule],
) -> Schedule:
    """A schedule whose worker j has stages j and 2n - 1 - j."""
    there = range(len(programs))
    return schedule_of(name, m, [*there, *reversed(there)], programs, family)
