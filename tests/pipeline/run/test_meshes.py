"""Stages whose places are meshes: the gradient is that of the whole batch."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pipeline.mesh_models import (
    LAYOUTS,
    SCHEDULES,
    candidate,
    judge,
    problem,
)

WIDE = "PP x DP x TP"


def judged(layouts, schedules, dtype=np.float32, reduction="mean", **options):
    own, batch, weights = problem(dtype=dtype)
    candidates = {
        f"{layout}, {schedule}": candidate(
            layout, schedule, weights, reduction=reduction, **options
        )
        for layout, schedule in itertools.product(layouts, schedules)
    }
    report = judge(reduction)(own, batch, candidates, weights=weights, seed=None)
    report.raise_if_failed()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "PP"])
def test_gradient_of_the_whole_batch(layout):
    """Uneven micro-batches, weights, a tied table, parameters used twice and never."""
    judged([layout], ["1F1B"])


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1F1B"])
def test_gradient_of_the_whole_batch_under_other_schedules(schedule):
    judged([WIDE], [schedule])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float64])
def test_gradient_of_the_whole_batch_in_other_precisions(dtype):
    judged([WIDE], ["1F1B"], dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_every_layout(schedule, dtype):
    judged(LAYOUTS, [schedule], dtype)
