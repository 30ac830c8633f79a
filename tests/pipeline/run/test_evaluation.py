"""Evaluation: the same loss without a gradient, and nothing that changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import pipeline
from tests.pipeline import shared, trained, worker_cases
from tests.pipeline.models import forward, losses, problem, stages, whole_losses

SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(3, 4),
    "zero bubble": pipeline.zero_bubble(3, 4),
    "looped": pipeline.looped_bfs(1, 4, 3),
    "replicas": shared.schedule(replicas=True),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("examples", [7, 1])
def test_loss_and_outputs_are_those_of_the_whole(schedule, examples):
    """Also of a batch with fewer examples than micro-batches, or than workers."""
    params, batch, weights = problem(examples, dtype=np.float64)
    weights[-1] = 1.5
    pipe = pipeline.Pipeline(stages(), losses, SCHEDULES[schedule])
    found = pipe.evaluate(params, batch, weights, outputs=True)
    expected = (whole_losses(params, batch) * weights).sum() / weights.sum()
    np.testing.assert_allclose(found.loss, expected, rtol=1e-13)
    np.testing.assert_allclose(found.outputs, forward(params, batch), rtol=1e-13)
    assert found.examples == (weights > 0).sum()
    np.testing.assert_allclose(found.weight, weights.sum(), rtol=1e-14)
    assert pipe.evaluate(params, batch).outputs is None


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_other_reductions(reduction):
    params, batch, weights = problem(7, dtype=np.float64)
    schedule = SCHEDULES["1F1B"]
    pipe = pipeline.Pipeline(stages(), losses, schedule, reduction=reduction)
    loss, _ = pipe.value_and_grad(params, batch, weights)
    found = pipe.evaluate(params, batch, weights)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-14)


def test_several_outputs_by_name():
    params, batch, _ = problem(5, dtype=np.float64)

    def both(values, batch):
        return losses(values["y"], batch) + values["m"].sum(-1)

    pipe = pipeline.Pipeline(
        stages(), both, pipeline.gpipe(3, 2), jax.devices()[:3], loss_inputs=("y", "m")
    )
    found = pipe.evaluate(pipe.place(params), batch, outputs=True).outputs
    np.testing.assert_allclose(found["y"], forward(params, batch), rtol=1e-13)
    assert found["m"].shape == (5, 5)
    assert found["m"].device == jax.devices()[2]


def steady(params, x):
    return trained.noisy(params, x, jax.random.key(0)) * 0 + jnp.tanh(
        x @ params["w"] + params["b"][None]
    )


def averaged(params, state, h):
    return (h - state["mean"][None]) @ params["w"]


def with_evaluation():
    return [
        pipeline.Stage(trained.noisy, ("x",), ("h",), keyed=True, in_evaluation=steady),
        pipeline.Stage(
            trained.centred, ("h",), ("y",), stateful=True, in_evaluation=averaged
        ),
    ]


def test_stages_that_differ_in_evaluation(caplog):
    """No key is drawn from, each micro-batch sees the same state, and it stays."""
    schedule = pipeline.one_f_one_b(2, 3)
    optimizer = trained.made()._optimizer
    pipe = pipeline.Pipeline(
        with_evaluation(), trained.losses, schedule, optimizer=optimizer
    )
    batch, weights = trained.batch_of(0)
    state, _ = trained.steps(pipe, trained.start(pipe), 2)
    before = trained.numbers(state)
    found = pipe.evaluate(state, batch, weights, outputs=True)
    h = steady(state.params[0], batch["x"])
    expected = averaged(state.params[1], state.states[1], h)
    np.testing.assert_allclose(found.outputs, expected, rtol=2e-6, atol=1e-6)
    trained.same(trained.numbers(state), before)
    with jax.log_compiles():
        again = pipe.evaluate(state, batch, weights)
    assert not [r for r in caplog.records if "Compiling" in r.message]
    assert float(again.loss) == float(found.loss)


def test_without_a_function_for_evaluation_the_stage_itself_runs():
    pipe = trained.made()
    state = trained.start(pipe)
    batch, weights = trained.batch_of(0)
    with pytest.raises(ValueError, match="stage 0 takes a PRNG key"):
        pipe.evaluate(state, batch, weights)
    key = jax.random.key(3)
    loss, _, after = pipe.value_and_grad(
        state.params, batch, weights, states=state.states, key=key
    )
    first = {name: rows[:3] for name, rows in batch.items()}
    found = pipe.evaluate(state, batch, weights, key=key, outputs=True)
    one = pipe.evaluate(state, first, weights[:3], key=key, outputs=True)
    assert one.outputs.shape == (3, 2)
    assert int(after[1]["seen"]) == trained.EXAMPLES
    assert int(state.states[1]["seen"]) == 0
    # The second micro-batch is given the state at the start, not the first one's.
    assert not np.allclose(found.loss, loss)


def test_nnx_modules_are_put_into_evaluation_mode():
    rngs = nnx.Rngs(0)
    modules = [
        nnx.Sequential(nnx.Linear(3, 5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)),
        nnx.Sequential(nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)),
    ]
    made = pipeline.stages_from_nnx(modules)
    pipe = pipeline.Pipeline(made.stages, losses, pipeline.gpipe(2, 2))
    rng = np.random.default_rng(5)
    rows = {"x": (5, 3), "target": (5, 2)}
    batch = {k: rng.normal(size=s).astype(np.float32) for k, s in rows.items()}
    key = jax.random.key(1)
    *_, states = pipe.value_and_grad(made.params, batch, states=made.states, key=key)
    found = pipe.evaluate(made.params, batch, states=states, outputs=True)
    nnx.update(modules[1], states[1])
    for module in modules:
        module.eval()
    expected = modules[1](modules[0](batch["x"]))
    np.testing.assert_allclose(found.outputs, expected, rtol=1e-5, atol=1e-6)


def test_workers_find_what_one_process_finds(cluster):
    params, batch, weights = problem(7)
    pipe = pipeline.Pipeline(stages(), losses, pipeline.one_f_one_b(3, 3))
    expected = pipe.evaluate(params, batch, weights, outputs=True)
    tasks = [cluster.start(r, worker_cases.evaluated) for r in range(3)]
    for rank, task in enumerate(tasks):
        found, again = task.result()
        assert found.loss == np.asarray(expected.loss) == again.loss
        assert found.weight == expected.weight
        assert (found.outputs is None) == (rank < 2)
    np.testing.assert_array_equal(found.outputs, expected.outputs)


def test_what_is_no_function():
    with pytest.raises(TypeError, match=r"in_evaluation=.* must be a function. Got 3"):
        pipeline.Stage(steady, in_evaluation=3)
