"""Stages whose places are meshes: the gradient is that of the whole batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import pipeline
from jdist.pipeline.run.micro_batch import split_batch
from jdist.pipeline.stages.place import StageMesh, moved
from tests.pipeline.mesh_models import (
    LAYOUTS,
    SCHEDULES,
    candidate,
    cut,
    judge,
    losses,
    meshes,
    problem,
    stages,
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
    report = judge(reduction)(
        own, batch, candidates, weights=weights, finite_differences=False
    )
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


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_every_layout(schedule, dtype):
    judged(LAYOUTS, [schedule], dtype)


@pytest.mark.parametrize(
    ("examples", "sizes"), [(10, [4, 4, 2]), (11, [4, 4, 3]), (7, [2, 2, 3])]
)
def test_micro_batches_are_multiples_of_the_data_axis(examples, sizes):
    """But the last one, which has what is left over."""
    batch = {"x": np.arange(float(examples))}
    parts = split_batch(batch, None, 3, "mean", 2)
    assert [len(part.weights) for part in parts] == sizes
    rows = np.concatenate([part.batch["x"] for part in parts])
    np.testing.assert_array_equal(rows, batch["x"])


def test_rows_lie_where_the_data_axis_puts_them():
    """Of values too, unless they do not divide; what has no rows is whole."""
    place = StageMesh(meshes(WIDE)[0], "data")
    wholly = {"odd": np.ones((3, 2)), "scalar": np.ones(())}
    found = moved({"even": np.ones((4, 2)), **wholly}, place)
    specs = {name: array.sharding.spec for name, array in found.items()}
    assert specs == {"even": P("data"), "odd": P(), "scalar": P()}


def test_a_data_axis_of_any_name():
    """Rows are split over it: the same bits as over "data"."""
    own, batch, weights = problem()
    found = []
    for axis in (None, "rows"):
        renamed = [Mesh(mesh.devices, (axis or "data",)) for mesh in meshes("PP x DP")]
        places = pipeline.Meshes(renamed, data_axis=axis)
        pipe = pipeline.Pipeline(stages(2), losses, SCHEDULES["1F1B"], places)
        assert [place.parts for place in pipe.communicator.places.devices] == [2, 2]
        found.append(pipe.value_and_grad(pipe.place(cut(own, 2)), batch, weights))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
