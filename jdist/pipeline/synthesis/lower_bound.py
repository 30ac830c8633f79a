"""Lower bounds of a makespan that need no search."""

import numpy as np

from jdist.pipeline.synthesis.problem import SchedulingProblem


def lower_bound(problem: SchedulingProblem) -> float:
    """Time below which no schedule ends: all bounds of `synthesize` but the solver's.

    Returns:
      Seconds, or units if the problem is in whole numbers.
    """
    backward = np.minimum(problem.backward_inputs, problem.backward)
    work = problem.forward + np.minimum(
        problem.backward, problem.backward_inputs + problem.backward_params
    )
    given = problem.placing == "given"
    # Stages on workers of choice may need no messages.
    delay = (problem.sending + problem.latency) * given
    none = np.zeros_like(problem.forward[:1])
    # The ways to a stage, from there to the last one and back, and then to the first.
    before = np.vstack([none, np.cumsum(problem.forward[:-1] + delay, axis=0)])
    later = np.vstack([problem.forward[1:] + backward[1:] + 2 * delay, none])
    turn = problem.forward + np.cumsum(later[::-1], axis=0)[::-1]
    after = np.vstack([none, np.cumsum(backward[:-1] + delay, axis=0)])
    # The first stage's W is left, or the rest of its whole B.
    found = [(turn[0] + work[0] - problem.forward[0]).max()]
    # Bytes by seconds until B ends, and until W ends or a whole B.
    area = problem.activation_bytes * (turn + backward)
    areas = np.minimum(
        problem.activation_bytes * (turn + problem.backward_inputs)
        + problem.pending_bytes * problem.backward_params,
        problem.activation_bytes * (turn + problem.backward),
    )
    stages, workers = np.arange(len(work)), np.arange(max(problem.workers) + 1)
    shared = [
        (stages[np.equal(problem.workers, w)], workers[w : w + 1]) for w in workers
    ]
    # Each stage has one of the workers, and all of them have all workers.
    chosen = [*((stages[s : s + 1], workers) for s in stages), (stages, workers)]
    for own, some in shared if given else chosen:
        count = 1 if len(own) == 1 else len(some)
        begin = before[own].min()
        found.append(begin + work[own].sum() / count)
        if problem.limit is not None:
            limits = problem.limit[some]
            most = limits.max() if len(own) == 1 else limits.sum()
            if limit := most - problem.weight_bytes[own, 0].sum():
                found.append(begin + areas[own].sum() / limit)
                found.append(begin + area[own].sum() / limit + after[own].min())
    return float(max(found))
