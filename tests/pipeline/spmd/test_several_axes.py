"""One program whose stages are divided over data and model axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline, verify
from tests.pipeline import language_blocks as model
from tests.pipeline.spmd_models import close

LAYOUTS = {
    "PP x DP": ((2, 2), ("stage", "data")),
    "PP x TP": ((2, 2), ("stage", "model")),
    "PP x DP x TP": ((2, 2, 2), ("stage", "data", "model")),
    "the stages inside": ((2, 2, 2), ("data", "stage", "model")),
}
SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(2, 3),
    "interleaved": pipeline.interleaved(2, 4, 2),
    "ZB-H1": pipeline.zero_bubble(2, 3),
    "GPipe": pipeline.gpipe(2, 3),
}


def mesh(layout):
    shape, names = LAYOUTS[layout]
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), names)


def made(layout, schedule="GPipe", overlap=False, **options):
    places = pipeline.OneProgram(mesh(layout), overlap=overlap)
    return model.pipeline_of(SCHEDULES[schedule], places, **options)


def placed(pipe, layout, params):
    return pipe.place(params, model.specs(pipe, "model" in LAYOUTS[layout][1]))


def on_one(schedule, **options):
    """The same stages, one after another on a single device."""
    places = [jax.devices()[0]] * 2
    return model.pipeline_of(SCHEDULES[schedule], places, **options)


@functools.cache
def gradient_on_one(schedule):
    params, batch, weights = model.problem(SCHEDULES[schedule].stages, np.float64)
    pipe = on_one(schedule)
    found = pipe.value_and_grad(pipe.place(params), batch, weights)
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_equal_those_of_one_device(schedule, layout):
    """Float64; eleven examples: rows are padded to divide over the data axis."""
    params, batch, weights = model.problem(SCHEDULES[schedule].stages, np.float64)
    pipe = made(layout, schedule)
    found = pipe.value_and_grad(placed(pipe, layout, params), batch, weights)
    close(jax.tree.map(np.asarray, found), gradient_on_one(schedule))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_within_the_bound_of_the_whole_batch(dtype):
    """One judgement of all layouts: they have the whole batch's gradient in common."""
    params, batch, weights = model.problem(2, dtype)

    def candidate(layout):
        pipe = made(layout, "1F1B", tied=False)
        found = pipe.value_and_grad(placed(pipe, layout, params), batch, weights)
        return lambda *_: jax.tree.map(np.asarray, found)

    verify.gradients(
        model.whole_losses,
        params,
        batch,
        {name: candidate(name) for name in ("PP x DP", "PP x TP", "PP x DP x TP")},
        weights=weights,
    ).raise_if_failed()


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_every_reduction(reduction):
    params, batch, weights = model.problem(2, np.float64)
    pipe = made("PP x DP x TP", "ZB-H1", reduction=reduction)
    found = pipe.value_and_grad(placed(pipe, "PP x DP x TP", params), batch, weights)
    other = on_one("ZB-H1", reduction=reduction)
    expected = other.value_and_grad(other.place(params), batch, weights)
    close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected))


def test_training_keeps_every_layout(caplog):
    """Clipped by the norm over all, each parameter once; nothing compiles twice."""
    options = {"optimizer": optim.adam(lr=1e-2), "max_norm": 0.5}
    params, batch, weights = model.problem(2, np.float64)
    layout = "PP x DP x TP"
    pipe, other = made(layout, **options), on_one("GPipe", **options)
    state, same = pipe.init(placed(pipe, layout, params)), other.init(params)
    before = jax.tree.map(lambda x: x.sharding, state.params)
    state, metrics = pipe.train_step(state, batch, weights)
    same, expected = other.train_step(same, batch, weights)
    with jax.log_compiles():
        state, metrics = pipe.train_step(state, batch, weights)
    assert not [r for r in caplog.records if "Compiling" in r.message]
    same, expected = other.train_step(same, batch, weights)
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-12)
    np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=1e-12)
    found = jax.tree.map(np.asarray, (state.params, state.opt_states))
    close(found, jax.tree.map(np.asarray, (same.params, same.opt_states)))
    for (path, x), place in zip(
        jax.tree.leaves_with_path(state.params), jax.tree.leaves(before), strict=True
    ):
        assert x.sharding.is_equivalent_to(place, x.ndim), path


def test_messages_beside_actions_change_nothing():
    params, batch, weights = model.problem(2, np.float32)
    layout, found = "PP x DP x TP", []
    for overlap in (False, True):
        pipe = made(layout, overlap=overlap)
        own = pipe.value_and_grad(placed(pipe, layout, params), batch, weights)
        found.append(jax.tree.leaves(jax.tree.map(np.asarray, own)))
    for a, b in zip(*found, strict=True):
        assert a.tobytes() == b.tobytes()


def test_what_is_kept_is_divided_over_the_data_axis():
    """A wide batch: with two parts of its rows the program needs far less memory."""
    used = {}
    for count in (1, 2):
        devices = np.array(jax.devices()[: 2 * count]).reshape(2, count)
        places = pipeline.OneProgram(Mesh(devices, ("stage", "data")))
        pipe = model.pipeline_of(SCHEDULES["GPipe"], places)
        params, batch, weights = model.problem(2, np.float32, examples=3 * 256)
        lowered = pipe.lower(params, batch, weights)["all stages: gradient"]
        used[count] = lowered.compile().memory_analysis().temp_size_in_bytes
    assert used[2] < 0.65 * used[1]


def test_evaluation_on_several_axes():
    params, batch, weights = model.problem(2, np.float64)
    pipe = made("PP x DP x TP")
    found = pipe.evaluate(placed(pipe, "PP x DP x TP", params), batch, weights)
    expected = on_one("GPipe").evaluate(params, batch, weights)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-12)


# --- what is refused ---


def test_the_axis_of_stages_may_have_any_name():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    params, batch, weights = model.problem(2, np.float64)
    whole = Mesh(devices, ("rows", "pp"))
    places = pipeline.OneProgram(whole, stage_axis="pp", data_axis="rows")
    pipe = model.pipeline_of(SCHEDULES["GPipe"], places)
    found = pipe.value_and_grad(pipe.place(params), batch, weights)
    expected = on_one("GPipe").value_and_grad(params, batch, weights)
    close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stage_axis": "pp"}, "must have an axis 'pp', along which the stages are"),
        (
            {"data_axis": "rows"},
            r"axis of the mesh beside that of the stages\. Got 'rows', where these are "
            r"\['data', 'model'\]",
        ),
    ],
)
def test_axes_that_the_mesh_has_not(options, expected):
    with pytest.raises(ValueError, match=expected):
        pipeline.OneProgram(mesh("PP x DP x TP"), **options)


def test_axes_must_not_be_manual():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    kinds = (AxisType.Manual,) * 2
    manual = Mesh(devices, ("stage", "data"), axis_types=kinds)
    with pytest.raises(ValueError, match="must be meshes with automatic or explicit"):
        pipeline.OneProgram(manual)


def test_stages_that_are_sharded_differently_are_refused():
    pipe = made("PP x TP", first=False)
    params = [tree["block"] for tree in model.blocks(2, np.float32)]
    axes = [model.BLOCK, {**model.BLOCK, "up": P("model")}]
    own = pipe.place(params, axes)
    batch = {"x": np.ones((6, 3, 4), np.float32), "next": np.ones((6, 3), np.int32)}
    expected = "have parameters sharded like those of stage 0"
    with pytest.raises(ValueError, match=expected):
        pipe.value_and_grad(own, batch)


def test_too_few_examples_for_the_data_axis():
    params, batch, weights = model.problem(2, np.float32, examples=5)
    with pytest.raises(ValueError, match="one for each part of the data axis"):
        made("PP x DP").value_and_grad(params, batch, weights)
