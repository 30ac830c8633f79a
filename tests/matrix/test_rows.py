"""The rows as a whole: found by the judge, and left out where they cannot run."""

import functools
import re
import tomllib
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jdist import Unavailable
from jdist.matrix import data_parallel
from jdist.matrix.pipeline import _LAYOUTS, _ON_MESHES
from jdist.matrix.row import devices
from jdist.pipeline import Pipeline
from jdist.verify.matrix import GROUP, strategies

pytestmark = pytest.mark.compiled


def loss(params, batch):
    return batch @ params


def test_every_strategy_has_its_rows():
    """By the family's name; those of one family do not hide another's."""
    names = strategies()
    families = Counter(name.split()[0] for name in names)
    assert families == {"data_parallel": 19, "pipeline": 34, "autograd": 5}


def test_the_guide_names_all_schedules_and_layouts_of_stages_on_meshes():
    """With the largest share of the bound in each precision; all of them are rows."""
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    told = re.search(
        r"Over ([^.]+), under ([^.]+), the largest error is ([\d.]+) of the bound in "
        r"float32, ([\d.]+) in bfloat16 and ([\d.]+) in float64",
        " ".join(page.split()),
    )
    layouts, schedules = (re.split(", | and ", told[group]) for group in (1, 2))
    assert sorted(layouts) == sorted(_LAYOUTS)
    assert sorted(f"{schedule} x2" for schedule in schedules) == sorted(_ON_MESHES)
    assert all(0 < float(told[group]) < 1 for group in (3, 4, 5))
    rows = {name for name in strategies() if "on meshes" in name}
    assert rows == {
        f"pipeline on meshes, {schedule}, {layout}"
        for schedule in _ON_MESHES
        for layout in _LAYOUTS
    }


def test_by_default_each_schedule_and_each_layout_is_judged_once():
    """Over meshes; the other combinations, and these rows alone, are for `--all`."""
    default, every = strategies(combinations=False), strategies()
    assert default.keys() < every.keys()
    left = every.keys() - default.keys()
    assert len(left) == 12
    assert all(name.startswith("pipeline on meshes, ") for name in left)
    pairs = [name.split(", ")[1:] for name in default if "on meshes" in name]
    for chosen, known in zip(
        zip(*pairs, strict=True), (_ON_MESHES, _LAYOUTS), strict=True
    ):
        assert sorted(chosen) == sorted(known)


def test_the_judge_finds_them_by_one_entry_point():
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"][GROUP] == {
        "jdist": "jdist.matrix:strategies"
    }


def test_missing_devices_leave_a_row_out():
    """By name, with the number that it needs and the number that there is."""
    there = jax.device_count()
    with pytest.raises(Unavailable, match=f"needs {there + 1} devices, there are"):
        devices(there + 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("pipeline PipeDream with a flush", "not by max"),
    ],
)
def test_an_unknown_reduction_leaves_a_row_out(row, message):
    with pytest.raises(Unavailable, match=message):
        strategies()[row](loss, "max")


@pytest.mark.parametrize(
    ("examples", "replicas", "sizes"),
    [(11, 4, (7, 3, 1, 0)), (11, 1, (11,)), (3, 4, (0, 2, 1, 0))],
)
def test_shards_are_as_uneven_as_they_can_be(examples, replicas, sizes):
    assert data_parallel._sizes(examples, replicas) == sizes


def test_a_model_axis_divides_every_parameter(monkeypatch):
    """Of a problem whose sizes no two devices divide."""
    params = {"w": jnp.arange(15.0).reshape(5, 3), "b": jnp.ones(3), "s": jnp.ones(())}
    seen = []
    place = Pipeline.place

    def noted(pipe, *given):
        placed = place(pipe, *given)
        seen.extend(jax.tree.leaves(placed))
        return placed

    monkeypatch.setattr(Pipeline, "place", noted)

    def losses(params, x):
        return ((x @ params["w"]) * params["b"][None]).sum(-1) * params["s"]

    row = strategies()["pipeline on a mesh, model x2"](losses, "mean")
    x = np.linspace(-1, 2, 35).reshape(7, 5)
    loss, grads = row(params, x, None)
    wanted = jax.value_and_grad(lambda p: losses(p, x).mean())(params)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, (loss, grads), wanted)
    specs = {leaf.shape: leaf.sharding.spec for leaf in seen}
    assert specs == {(6, 3): P("model"), (4,): P("model"), (): P()}
