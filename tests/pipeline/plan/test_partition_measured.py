"""Measuring layers: what is written down, what is refused, and a plan from it."""

import importlib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jdist.pipeline import Module, load_profile, partition, profile


def dense(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def split(p, x):
    return x * p, x.astype(jnp.int32)


def join(p, x, skipped, number):
    return (x + skipped) * p + number.astype(x.dtype)


def parameters(rng, rows, columns):
    return {
        "w": jnp.asarray(rng.normal(size=(rows, columns)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(1, columns)), jnp.float32),
    }


@pytest.fixture
def layers(rng):
    """in -> two values -> mid, and both around it: a skip connection."""
    scale = jnp.asarray(rng.normal(size=(1, 7)), jnp.float32)
    return [
        Module("in", dense, parameters(rng, 5, 7)),
        Module("fork", split, scale, ("x",), ("x", "whole")),
        Module("mid", dense, parameters(rng, 7, 7), ("x",), ("y",)),
        Module("join", join, scale, ("y", "x", "whole"), ("x",)),
        Module("out", dense, parameters(rng, 7, 3)),
    ]


@pytest.fixture
def batch(rng):
    return {"x": jnp.asarray(rng.normal(size=(11, 5)), jnp.float32)}


def test_bytes_and_edges_are_exact(layers, batch):
    found = profile(layers, batch, repeats=1)
    assert found.edges == (
        ("input_x", "in"), ("in", "fork"), ("fork", "mid"),
        ("mid", "join"), ("fork", "join"), ("join", "out"),
    )  # fmt: skip
    sizes = {layer.name: layer.activation_bytes for layer in found.layers}
    wide, narrow = 4.0 * 11 * 7, 4.0 * 11 * 3
    assert sizes == {
        "input_x": (0,), "in": (wide,), "fork": (wide, wide),
        "mid": (wide,), "join": (wide,), "out": (narrow,),
    }  # fmt: skip
    weights = {layer.name: layer.parameter_bytes for layer in found.layers}
    assert weights == {
        "input_x": 0, "in": 4 * 42, "fork": 4 * 7,
        "mid": 4 * 56, "join": 4 * 7, "out": 4 * 24,
    }  # fmt: skip
    assert all(layer.forward > 0 < layer.backward for layer in found.layers[1:])
    assert found["mid"].description == "dense"


def test_from_measurement_to_plan(layers, batch, tmp_path):
    """Written and read as PipeDream's format; every layer finds a stage."""
    profile(layers, batch, repeats=1).write(tmp_path / "measured.txt")
    plan = partition(load_profile(tmp_path / "measured.txt"), 2, 1e9)
    planned = [name for stage in plan.stages for name in stage.layers]
    assert planned == ["in", "fork", "mid", "join", "out"]


def test_the_median_of_the_repeats_counts(monkeypatch, layers, batch):
    """Times by hand: forward passes take 5, 1, 3 s, backward passes 20, 70, 30 s."""
    module = importlib.import_module("jdist.pipeline.stages.measure")
    times = iter([[5, 1, 3], [20, 70, 30]])

    def repeated(run, number, repeat):
        assert (number, repeat) == (1, 3)
        run()
        return next(times)

    monkeypatch.setattr(module.timeit, "repeat", repeated)
    measured = profile(layers[:1], batch, repeats=3)["in"]
    assert (measured.forward, measured.backward) == (3, 30)


def test_repeats_do_not_compile(layers, batch):
    """Ten runs trace each function as often as one does."""
    traced = []

    def counted(p, x):
        traced.append(x.shape)
        return x * p

    scale = jnp.ones((1, 5), jnp.float32)
    profile([Module("a", counted, scale)], batch, repeats=1)
    once = len(traced)
    other = jnp.full((1, 6), 2, jnp.float32)
    wider = {"x": jnp.ones((11, 6), jnp.float32)}
    profile([Module("b", counted, other)], wider, repeats=10)
    assert len(traced) == 2 * once


def test_numpy_batches_are_fine(layers, batch):
    given = {"x": np.asarray(batch["x"])}
    assert profile(layers, given, repeats=1)["in"].activation_bytes == (308,)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda ls: [], "must not be empty"),
        (lambda ls: ls[1:2] * 2, r"different names.*'fork'"),
        (lambda ls: ls[3:], "must write 'y' before 'join' reads it"),
        (
            lambda ls: [ls[0], replace(ls[1], outputs=("x", "y", "z"))],
            r"'fork'` must return the 3 outputs .*Got a tuple of 2",
        ),
    ],
)
def test_what_is_refused(change, match, layers, rng):
    batch = {"x": jnp.asarray(rng.normal(size=(11, 7)), jnp.float32)}
    if "fork'`" in match:
        batch = {"x": batch["x"][:, :5]}
    with pytest.raises(ValueError, match=match):
        profile(change(layers), batch, repeats=1)


def test_repeats_are_counted(layers, batch):
    with pytest.raises(ValueError, match=r"profile\(repeats=...\).*Got 0"):
        profile(layers, batch, repeats=0)
