"""Names of values, micro-batches, and what is refused before the first step."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline.run.micro_batch import split_batch
from jdist.pipeline.stages.wiring import BATCH, wire
from tests.pipeline.epochs import forward_only
from tests.pipeline.models import losses, problem, stages
from tests.pipeline.places import workers

S = pipeline.Stage


def double(params, *inputs):
    return 2 * inputs[0]


def pipe_of(*made, schedule=None, **options):
    schedule = schedule or pipeline.gpipe(len(made), 2)
    return pipeline.Pipeline(list(made), losses, schedule, **options)


def test_where_values_come_from_and_go():
    found = wire(stages())
    assert found.source == [
        {"x": BATCH},
        {"h": 0},
        {"m": 1, "skip": 0, "h": 0, "bias": BATCH},
        {"y": 2},
    ]
    assert found.consumers == [{"h": (1, 2), "skip": (2,)}, {"m": (2,)}, {"y": (3,)}]
    assert found.from_batch(2) == {"bias"}
    chosen = wire(stages(), loss_inputs=("y", "m"))
    assert chosen.consumers[1] == {"m": (2, 3)}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "must not be empty"),
        (
            [S(double, ("x",), ("h",)), S(double, ("h",), ("h",))],
            "must output each value once, 'h' comes from stage 0. Got stage 1 too",
        ),
        (
            [S(double, ("y",), ("h",)), S(double, ("h",), ("y",))],
            "must output a value before it is taken: stage 0 takes 'y'",
        ),
        (
            [S(double, ("x",), ("h", "lost")), S(double, ("h",), ("y",))],
            "must take every output. Got 'lost' of stage 0",
        ),
    ],
)
def test_names_that_do_not_match_up(made, message):
    with pytest.raises(ValueError, match=message):
        wire(made)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"fn": 3}, TypeError, r"`Stage\(fn\)` must be a function. Got 3"),
        ({"inputs": "x"}, TypeError, "must be a tuple of names. Got x"),
        ({"inputs": ("x", "x")}, ValueError, "must be different names"),
        ({"outputs": ()}, ValueError, "must name one value at least"),
        ({"recompute": "all"}, ValueError, "must be one of False, True, 'dots'"),
    ],
)
def test_stages_that_are_none(arguments, kind, message):
    with pytest.raises(kind, match=message):
        S(**{"fn": double, **arguments})


def step(pipe, params=None, **batch):
    rows = {"x": np.ones((4, 3)), "target": np.ones((4, 3)), **batch}
    return pipe.value_and_grad(params or [None] * len(pipe.stages), rows)


def two(params, x):
    return x, x


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            [S(double, ("x",), ("h",)), S(double, ("h", "z"), ("y",))],
            r"must output 'z', or the batch have it, because stage 1 takes it. "
            r"Got a batch of \['target', 'x'\]",
        ),
        (
            [S(two, ("x",), ("h",)), S(lambda w, h: h @ h, ("h",), ("y",))],
            r"stage 1 cannot take h: \(float64\[2,3\], float64\[2,3\]\)",
        ),
        (
            [S(double, ("x",), ("h", "k")), S(double, ("h", "k"), ("y",))],
            r"must return the 2 outputs \('h', 'k'\). Got an array",
        ),
        (
            [S(lambda w, x: x @ w, ("x",), ("h",)), S(double, ("h",), ("y",))],
            r"stage 0 cannot take x: float64\[2,3\]. Got TypeError",
        ),
        (
            [
                S(lambda w, s, x: (x, x), ("x",), ("h",), stateful=True),
                S(double, ("h",), ("y",)),
            ],
            r"must return a state like the one it was given, at stage 0 None",
        ),
        (
            [
                S(lambda w, s, x: x, ("x",), ("h",), stateful=True),
                S(double, ("h",), ("y",)),
            ],
            r"must return \(outputs, state\) where it is stateful, as stage 0",
        ),
    ],
)
def test_stages_that_do_not_fit_together(made, message):
    with pytest.raises(ValueError, match=message):
        step(pipe_of(*made))


def test_a_dtype_that_does_not_fit():
    """Between two stages, found by the one that cannot take it."""
    single = jnp.ones((2, 3), jnp.float32)
    stages = [
        S(lambda w, x: x.astype(jnp.float16) @ w, ("x",), ("h",)),
        S(lambda w, h: jax.lax.mul(h, w), ("h",), ("y",)),
    ]
    message = r"stage 1 cannot take h: float16\[2,3\]. Got TypeError: .*16.*float32"
    with pytest.raises(ValueError, match=message):
        step(pipe_of(*stages), [jnp.ones((3, 3), jnp.float16), single])


def chain():
    return S(double, ("x",), ("h",)), S(double, ("h",), ("y",))


def test_losses_must_be_one_for_each_example():
    pipe = pipeline.Pipeline(chain(), lambda y, batch: y.sum(), pipeline.gpipe(2, 2))
    with pytest.raises(ValueError, match="must return one real loss per example"):
        step(pipe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": pipeline.gpipe(3, 2)},
            "must be one for the 2 stages. Got one fo",
        ),
        ({"schedule": forward_only(2, 2)}, "must have a backward pass for"),
        ({"reduction": "median"}, "must be one of 'mean', 'sum', 'max', 'min'"),
        ({"places": jax.devices()[:3]}, "one for each of the 2 workers"),
        (
            {"loss_inputs": ("y", "z", "h"), "schedule": pipeline.gpipe(3, 1)},
            "the 2 st",
        ),
    ],
)
def test_pipelines_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        pipe_of(*chain(), **options)


@pytest.mark.parametrize("schedule", ["1f1b", pipeline.gpipe])
def test_a_schedule_is_no_name(schedule):
    """torch's names are functions here."""
    message = r"must be a Schedule\. Got {}.*: `one_f_one_b\(2, 4\)` is 1F1B with"
    with pytest.raises(TypeError, match=message.format(re.escape(repr(schedule)))):
        pipe_of(*chain(), schedule=schedule)


def test_workers_need_rpc():
    with pytest.raises(Exception, match="RPC has not been initialized"):
        pipe_of(*chain(), places=workers(2))


@pytest.mark.parametrize(
    ("params", "batch", "weights", "kind", "message"),
    [
        ([None], {}, None, ValueError, "must be a list of 2 trees, one per stage"),
        (None, {"x": np.ones((3, 3))}, None, ValueError, "same first dimension"),
        (None, None, [1.0, 1, 1], ValueError, "one number for each of the 4 examples"),
        (None, None, [1.0, 1, 1, -1], ValueError, "must be finite and not negative"),
        (None, None, [1, np.nan, 1, 1], ValueError, "must be finite and not negative"),
        (None, None, [0.0] * 4, ValueError, "must not all be zero"),
    ],
)
def test_arguments_that_are_wrong(params, batch, weights, kind, message):
    rows = {"x": np.ones((4, 3)), "target": np.ones((4, 3)), **(batch or {})}
    with pytest.raises(kind, match=message):
        pipe_of(*chain()).value_and_grad(params or [None, None], rows, weights)


def test_batches_that_cannot_be_cut():
    with pytest.raises(ValueError, match="an example for each of the 3 micro-batches"):
        split_batch({"x": np.ones((2, 1))}, None, 3, "mean")
    with pytest.raises(TypeError, match=r"must be a dict of named arrays"):
        split_batch(np.ones((2, 1)), None, 1, "sum")


def test_no_example_is_added_or_left_out():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(11, 2)), "deep": {"y": rng.normal(size=11)}}
    weights = rng.uniform(size=11)
    parts = split_batch(batch, weights, 4, "sum")
    assert [len(part.weights) for part in parts] == [3, 3, 3, 2]
    whole = jax.tree.map(lambda *rows: np.concatenate(rows), *[p.batch for p in parts])
    assert np.array_equal(whole["x"], batch["x"])
    assert np.array_equal(whole["deep"]["y"], batch["deep"]["y"])
    assert np.array_equal(np.concatenate([p.weights for p in parts]), weights)
    assert [p.total for p in parts] == [float(p.weights.sum()) for p in parts]


def test_single_weights_are_added_up_in_double():
    rng = np.random.default_rng(1)
    weights = rng.uniform(size=1001).astype(np.float32)
    (part,) = split_batch({"x": np.zeros(1001)}, weights, 1, "sum")
    assert part.total == math.fsum(weights.tolist())


def test_labels_must_lie_where_the_loss_is():
    params, batch, weights = problem(6)
    first, second, third = jax.devices()[:3]
    pipe = pipeline.Pipeline(
        stages(), losses, pipeline.gpipe(3, 2), [first, second, third]
    )
    placed = pipe.place(params)
    there = {**batch, "target": jax.device_put(batch["target"], third)}
    pipe.value_and_grad(placed, there, weights)
    wrong = {**batch, "target": jax.device_put(batch["target"], first)}
    message = "must have 'target' on .*, where the loss takes it. Got 'target' on"
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(placed, wrong, weights)
    wrong = {**batch, "bias": jax.device_put(batch["bias"], second)}
    with pytest.raises(ValueError, match=r"'bias' on .*, where stage 2 takes it"):
        pipe.value_and_grad(placed, wrong, weights)
    unread = {**batch, "name": jax.device_put(batch["name"], second)}
    pipe.value_and_grad(placed, unread, weights)
    assert jnp.isfinite(pipe.value_and_grad(placed, there, weights)[0])
