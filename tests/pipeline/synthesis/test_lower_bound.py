"""Bounds without a search: below every family, and reached where they can be."""

import numpy as np

from jdist import pipeline
from jdist.pipeline import Costs, simulate
from jdist.pipeline.synthesis.lower_bound import lower_bound
from jdist.pipeline.synthesis.problem import SchedulingProblem, common_unit

FAMILIES = (
    pipeline.gpipe,
    pipeline.one_f_one_b,
    pipeline.zero_bubble,
    pipeline.zbv,
    pipeline.v_half,
    pipeline.v_min,
    lambda n, m: pipeline.split_drain(pipeline.one_f_one_b(n, m)),
    lambda n, m: pipeline.looped_bfs(n, m, 2),
)


def problem_of(schedule, costs, limited=True):
    workers = tuple(place[0] for place in schedule.placement)
    made = SchedulingProblem.of(costs, workers, schedule.micro_batches)
    limit = np.array(simulate(schedule, costs).activation_bytes)
    return made if not limited else made.__class__(**{**vars(made), "limit": limit})


def test_no_family_is_faster_than_its_bound(rng):
    """Random costs of each micro-batch, and the memory that the family needs."""
    for family in FAMILIES:
        for _ in range(25):
            n, m = (int(x) for x in rng.integers(1, 7, 2))
            schedule = family(n, m)
            shape = (schedule.stages, m)
            names = ("forward", "backward", "backward_inputs", "backward_params")
            costs = Costs(
                **{name: rng.uniform(0, 2, shape) for name in names},
                latency=rng.uniform(0, 1),
                message_bytes=rng.uniform(0, 1),
                bandwidth=2.0,
                activation_bytes=rng.uniform(0, 2, shape),
            )
            for limited in (False, True):
                least = lower_bound(problem_of(schedule, costs, limited))
                assert 0 < least <= simulate(schedule, costs).makespan + 1e-12


def test_each_bound_is_reached():
    """By a micro-batch alone, a worker that is never idle, and memory that is full."""
    way = Costs(forward=[1, 2, 5], backward=[2, 4, 3], latency=[7, 1])
    alone = pipeline.zero_bubble(3, 1)
    assert lower_bound(problem_of(alone, way)) == simulate(alone, way).makespan
    busy = pipeline.zero_bubble(4, 9)
    assert lower_bound(problem_of(busy, Costs())) == simulate(busy).makespan
    # One micro-batch at a time: between two of them nothing is held for no time.
    serial = pipeline.Schedule.of(
        [[f"{s}{kind}{i}" for i in range(5) for kind in "FB"] for s in range(3)]
    )
    costs = Costs(
        forward=[1, 2, 4], backward=3, backward_inputs=3, activation_bytes=[7, 0, 0]
    )
    least = lower_bound(problem_of(serial, costs))
    assert lower_bound(problem_of(serial, costs, limited=False)) < least
    assert least == simulate(serial, costs).makespan


def test_whole_numbers():
    """Exact multiples stay so; other seconds are rounded down, and none to nothing."""
    costs = Costs(forward=[0.3, 1.2], backward=[0.6, 2.1], latency=0.9)
    given = problem_of(pipeline.gpipe(2, 3), costs, limited=False)
    found, unit, raised = given.in_whole_numbers(9.0)
    assert raised == 0
    # Half of 2.1 belongs to each half of a backward pass.
    assert found.forward[:, 0].tolist() == [2, 8]
    assert (found.backward_inputs[1, 0] * unit, unit) == (1.05, 0.15)
    costs = Costs(forward=[np.pi, 1e-9], backward=[2.0, 1.0])
    given = problem_of(pipeline.gpipe(2, 3), costs, limited=False)
    found, unit, raised = given.in_whole_numbers(20.0)
    assert raised == 3
    assert (found.forward[1] == 1).all()
    assert (found.forward[0] * unit <= np.pi).all()
    assert common_unit([np.array([6.0, 0.0]), np.array([[9.0]])]) == 3
    assert common_unit([np.array([1 / 3, 2.5])]) == 1 / 6
    assert common_unit([np.array([np.pi])]) == 0
    assert common_unit([np.zeros(2)]) == 0
