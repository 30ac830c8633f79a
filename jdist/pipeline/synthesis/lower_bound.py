"""Lower bounds of a makespan that need no search."""

import numpy as np

from jdist.pipeline.synthesis.problem import SchedulingProblem


def lower_bound(problem: SchedulingProblem) -> float:
    """Time below which no schedule ends: all bounds of `synthesize` but the solver's.

    Returns:
      Seconds, or units if the problem is in whole numbers.
    """
    backward = np.minimum(problem.inputs, problem.whole)
    work = problem.forward + np.minimum(problem.whole, problem.inputs + problem.params)
    delay = problem.sending + problem.latency
    none = np.zeros_like(problem.forward[:1])
    # The ways to a stage, from there to the last one and back, and then to the first.
    before = np.vstack([none, np.cumsum(problem.forward[:-1] + delay, axis=0)])
    later = np.vstack([problem.forward[1:] + backward[1:] + 2 * delay, none])
    turn = problem.forward + np.cumsum(later[::-1], axis=0)[::-1]
    after = np.vstack([none, np.cumsum(backward[:-1] + delay, axis=0)])
    # The first stage's W is left, or the rest of its whole B.
    found = [(turn[0] + work[0] - problem.forward[0]).max()]
    # Bytes by seconds until B ends, and until W ends or a whole B.
    area = problem.activation * (turn + backward)
    areas = np.minimum(
        problem.activation * (turn + problem.inputs) + problem.pending * problem.params,
        problem.activation * (turn + problem.whole),
    )
    for worker, busy in enumerate(problem.of_each_worker(work).sum(axis=1)):
        own = [s for s, place in enumerate(problem.workers) if place == worker]
        begin = before[own].min()
        found.append(begin + busy)
        if problem.limit is not None and problem.limit[worker]:
            limit = problem.limit[worker]
            found.append(begin + areas[own].sum() / limit)
            found.append(begin + area[own].sum() / limit + after[own].min())
    return float(max(found))
