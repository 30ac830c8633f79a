"""Pipelines lowered from shapes: the programs that a call then runs, and no others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline, rpc
from jdist.pipeline.run.executor import CallInputs
from jdist.segment._lookup.cache import VERSIONS
from tests.pipeline import spmd_models
from tests.pipeline.models import losses, problem, stages

HALF = optim.with_master_weights(
    optim.adam(), compute_dtype=jnp.bfloat16, loss_scale=8.0
)
SCHEDULES = {
    "gpipe": (pipeline.gpipe(3, 2), {}),
    "1F1B": (pipeline.one_f_one_b(3, 4), {"max_norm": 0.1}),
    "zero bubble": (pipeline.zero_bubble(3, 3), {}),
    "masters": (pipeline.one_f_one_b(3, 2), {"optimizer": HALF}),
    "pipedream": (pipeline.pipedream(3, 3), {}),
    "flush": (pipeline.pipedream(3, 3, policy="flush"), {}),
}


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def devices(kind):
    own = jax.devices("cpu")
    if kind == "meshes":
        pairs = (own[0:2], own[2:4], own[4:6])
        return [jax.sharding.Mesh(np.array(pair), ("data",)) for pair in pairs]
    return None if kind == "no devices" else own[:3]


def compiled_in(records):
    """Programs of stages, losses and updates that were compiled."""
    names = r"Compiling jit\((body_\w+|both|_update\w*)\)"
    return [m.group(1) for r in records if (m := re.match(names, r.message))]


@pytest.mark.parametrize("places", ["no devices", "devices", "meshes"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_lowered_is_what_a_step_runs(name, places, caplog):
    """Compiled from shapes; the call then finds them all and compiles no other."""
    schedule, options = SCHEDULES[name]
    options = {"optimizer": optim.adam()} | options
    params, batch, _ = problem(8 if places == "meshes" else 7)
    if "masters" in name:
        batch = {k: x.astype(jnp.bfloat16) for k, x in batch.items() if k != "name"}
    pipe = pipeline.Pipeline(stages(), losses, schedule, devices(places), **options)
    # As in a new process: else stages may be those of an earlier pipeline, which
    # compiled some programs for shapes and others for arrays.
    VERSIONS.clear()
    jax.clear_caches()
    found = pipe.lower(pipe.init(shapes(params)), shapes(batch))
    for lowered in found.values():
        lowered.compile()
    state = pipe.init(params)
    caplog.clear()
    with jax.log_compiles():
        if schedule.update_policy is None:
            pipe.train_step(state, batch)
        else:
            pipe.train_epoch(state, [batch] * 3)
    assert not compiled_in(caplog.records)
    # One of a single micro-batch's gradient is a part of the backward pass.
    own = "backward" if name == "pipedream" else "update"
    assert {f"stage {j}: {own}" for j in range(3)} <= {*found}
    assert {f"stage {j}: forward" for j in range(3)} <= {*found}


def test_no_program_is_lowered_that_no_call_runs(caplog):
    """As many as a call compiles, uneven micro-batches and split passes included."""
    params, batch, _ = problem(7)
    schedule, _ = SCHEDULES["zero bubble"]

    def made():
        return pipeline.Pipeline(
            stages(), losses, schedule, devices("devices"), optimizer=optim.adam()
        )

    found = made().lower(made().init(shapes(params)), shapes(batch))
    jax.clear_caches()
    pipe = made()
    state = pipe.init(params)
    with jax.log_compiles():
        pipe.train_step(state, batch)
    parts = ("forward", "backward", "update")
    wanted = [name for name in found if any(part in name for part in parts)]
    assert len(wanted) == len(compiled_in(caplog.records))


def test_a_gradient_has_no_updates():
    params, batch, _ = problem(4)
    pipe = pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 2))
    found = pipe.lower(shapes(params), shapes(batch))
    assert not [name for name in found if "update" in name]
    assert "stage 2: gradient" in found


def test_cotangents_of_two_consumers_are_added_up_by_a_program_of_that_name():
    """A value that the next two stages read has a sum, called what it is."""

    def scaled(params, h):
        return jnp.tanh(h * params)

    def joined(params, h, s):
        return h * params + s

    own = [
        pipeline.Stage(scaled, inputs=("x",), outputs=("s",)),
        pipeline.Stage(scaled, inputs=("s",), outputs=("h",)),
        pipeline.Stage(joined, inputs=("h", "s"), outputs=("y",)),
    ]
    schedule = pipeline.gpipe(3, 2)
    pipe = pipeline.Pipeline(own, lambda y, batch: (y - batch["y"]) ** 2, schedule)
    weights = tuple(jnp.float32(x) for x in (0.3, 0.5, 0.7))
    rows = jnp.arange(7, dtype=jnp.float32)
    found = pipe.lower(shapes(weights), shapes({"x": rows, "y": rows}))
    assert "sum: cotangent" in found
    assert not [name for name in found if "lambda" in name]


def test_tied_gradients_are_added_up_at_each_stage(caplog):
    """On the stage's own device, by the programs that a step then runs."""

    def ends(params, x):
        return jnp.tanh(x @ params["w"])

    made = [
        pipeline.Stage(ends, ("x",), ("h",), tied={"w": "shared"}),
        pipeline.Stage(lambda w, h: h * w[None], ("h",), ("k",)),
        pipeline.Stage(ends, ("k",), ("y",), tied={"w": "shared"}),
    ]
    w = {"w": np.full((3, 3), 0.3, np.float32)}
    params = [w, np.full(3, 0.7, np.float32), w]
    batch = {"x": np.ones((4, 3), np.float32)}
    own = devices("devices")
    options = {"optimizer": optim.sgd(lr=0.1)}
    pipe = pipeline.Pipeline(
        made, lambda y, _: y.sum(-1), pipeline.gpipe(3, 2), own, **options
    )
    jax.clear_caches()
    found = pipe.lower(pipe.init(shapes(params)), shapes(batch))
    added = [name for name in found if "tied" in name]
    assert added == ["stage 0: tied gradients", "stage 2: tied gradients"]
    for name, device in zip(added, (own[0], own[2]), strict=True):
        places = jax.tree.leaves(found[name].compile().input_shardings)
        assert {d for place in places for d in place.device_set} == {device}
    assert "stablehlo.add" in found[added[0]].as_text()
    state = pipe.init(params)
    caplog.clear()
    with jax.log_compiles():
        pipe.train_step(state, batch)
    assert not any("Compiling jit(_sum)" in r.message for r in caplog.records)


def test_stages_stay_on_their_devices():
    params, batch, _ = problem(4)
    own = devices("devices")
    pipe = pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 2), own)
    found = pipe.lower(shapes(params), shapes(batch))
    for j, device in enumerate(own):
        compiled = found[f"stage {j}: backward"].compile()
        places = jax.tree.leaves(compiled.input_shardings)
        assert {d for place in places for d in place.device_set} == {device}


def test_states_and_keys_are_shapes():
    def noisy(params, state, x, key):
        h = x @ params + jax.random.normal(key, x.shape[:1], x.dtype)[:, None]
        return h, state + h.mean()

    one = pipeline.Stage(noisy, ("x",), ("y",), stateful=True, keyed=True)
    pipe = pipeline.Pipeline(
        [one], lambda y, batch: y.sum(-1), pipeline.gpipe(1, 2), optimizer=optim.sgd()
    )
    params, states = [np.ones((3, 2), np.float32)], [np.zeros((), np.float32)]
    given = pipe.init(shapes(params), shapes(states), shapes(jax.random.key(0)))
    assert (given.states[0].shape, given.key.shape) == ((), ())
    x = {"x": np.ones((4, 3), np.float32)}
    found = pipe.lower(given, shapes(x))
    assert {"stage 0: fold", "stage 0: backward", "stage 0: update"} <= {*found}


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_one_program_from_shapes_gives_the_same_bits(max_norm):
    params, batch, weights = spmd_models.problem(2, 6)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("stage",))
    schedule = pipeline.one_f_one_b(2, 3)
    pipe = pipeline.Pipeline(
        spmd_models.stages(2),
        spmd_models.losses,
        schedule,
        pipeline.OneProgram(mesh),
        optimizer=optim.adam(),
        max_norm=max_norm,
    )
    jax.clear_caches()
    found = pipe.lower(pipe.init(shapes(params)), shapes(batch), weights)
    names = ["all stages: gradient", "stage 0: update", "stage 1: update"]
    assert list(found) == names
    compiled = {name: lowered.compile() for name, lowered in found.items()}
    given = CallInputs(pipe.place(params), batch, weights, [None] * 2)
    program, arguments = pipe.executor._prepared(given)
    assert program.run.lower(*arguments).as_text() == found[names[0]].as_text()
    loss, grads, *_ = compiled[names[0]](*arguments)
    expected, of_stages = pipe.value_and_grad(pipe.place(params), batch, weights)
    np.testing.assert_array_equal(loss, expected)
    rows = np.split(np.asarray(grads[0]["w"]), 2)
    for found, own in zip(rows, of_stages, strict=True):
        np.testing.assert_array_equal(found, own["w"])


def test_workers_of_other_processes_are_refused():
    params, batch, _ = problem(4)
    names = ["a", "b", "c"]
    with rpc.local_cluster(names), rpc.use_worker("a"):
        places = pipeline.Workers(names)
        pipe = pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 2), places)
        with pytest.raises(ValueError, match="where one process has all stages"):
            pipe.lower(shapes(params), shapes(batch))
