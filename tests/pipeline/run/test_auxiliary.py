"""Auxiliary outputs of losses: an entry for each micro-batch, on every worker."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import optim, pipeline
from jdist.pipeline.run.loss import merged, stacked
from tests.pipeline import aux_cases as cases
from tests.pipeline import models
from tests.pipeline.aux_cases import expected, made, problem
from tests.pipeline.epochs import asynchronous
from tests.pipeline.places import workers

SCHEDULES = {
    "zero bubble": pipeline.zero_bubble(3, 3),
    "replicas": pipeline.one_f_one_b(3, 3, replicas=(1, 1, 2)),
}
SIZES = [3, 2, 2]


def same(found, wanted, **options):
    found = found | {"worst": found["worst"][0]}
    assert found.keys() == wanted.keys()
    for name, entries in wanted.items():
        assert found[name].shape == entries.shape
        np.testing.assert_allclose(found[name], entries, err_msg=name, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_entry_for_each_micro_batch(schedule):
    """Of the parameters before the step; gradients are those without it."""
    params, batch, weights = problem(dtype=np.float64)
    where = jax.devices()[: SCHEDULES[schedule].workers]
    pipe = made(SCHEDULES[schedule], where)
    plain = pipeline.Pipeline(
        models.stages(), models.losses, SCHEDULES[schedule], where
    )
    # In a backward pass another example stands where one has weight 0.
    assert weights[0] == 0 < weights[1]
    rows = [1, *range(1, len(weights))]
    filled = jax.tree.map(lambda x: x[np.array(rows)], batch)
    wanted = expected(models.forward(params, filled), filled, SIZES)
    placed = pipe.place(params)
    (loss, aux), grads = pipe.value_and_grad(placed, batch, weights)
    same(aux, wanted, rtol=1e-12)
    other, without = plain.value_and_grad(plain.place(params), batch, weights)
    assert loss == other
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(without), strict=True):
        assert np.array_equal(a, b)
    state, metrics = pipe.train_step(pipe.init(params), batch, weights)
    same(metrics.aux, wanted, rtol=1e-12)
    newest = jax.tree.map(np.asarray, state.params)
    after = expected(models.forward(newest, batch), batch, SIZES)
    found = pipe.evaluate(state, batch, weights)
    same(found.aux, after, rtol=1e-12)
    assert metrics.examples == found.examples == (weights > 0).sum()
    assert plain.evaluate(placed, batch, weights).aux is None


def test_states_come_last():
    stage = pipeline.Stage(
        lambda w, s, x: (x * w, s + 1), ("x",), ("y",), stateful=True
    )
    pipe = pipeline.Pipeline(
        [stage], lambda y, b: (y, y.sum()), pipeline.gpipe(1, 2), has_aux=True
    )
    batch = {"x": jnp.array([1.0, 2.0, 3.0])}
    found = pipe.value_and_grad([2.0], batch, states=[jnp.array(0)])
    (loss, aux), (grad,), (state,) = found
    assert (float(loss), float(grad), int(state)) == (4.0, 2.0, 2)
    assert aux.tolist() == [6.0, 6.0]


def test_no_gradient_flows_into_them():
    stage = pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))
    pipe = pipeline.Pipeline(
        [stage], lambda y, b: (0 * y, y), pipeline.gpipe(1, 1), has_aux=True
    )
    (_, aux), (grad,) = pipe.value_and_grad([3.0], {"x": jnp.array([1.0, 2.0])})
    assert (aux.tolist(), float(grad)) == ([[3.0, 6.0]], 0.0)


def test_inside_jit():
    params, batch, _ = problem()
    pipe = made(SCHEDULES["zero bubble"])
    (loss, aux), _ = jax.jit(pipe.value_and_grad)(params, batch)
    (plain, eager), _ = pipe.value_and_grad(params, batch)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    assert aux["above"].tolist() == eager["above"].tolist()


def test_every_worker_has_them(cluster):
    """To the bit as one process has; two workers run the loss."""
    given = SCHEDULES["replicas"]
    tasks = [
        cluster.start(rank, cases.everything, given, workers(given.workers))
        for rank in range(given.workers)
    ]
    alone = cases.everything(given)
    for task in tasks:
        for a, b in zip(
            jax.tree.leaves(task.result()), jax.tree.leaves(alone), strict=True
        ):
            assert np.array_equal(a, b)


def test_epochs_of_pipedream():
    """One array for all micro-batches."""
    aux = cases.asynchronous()
    sizes = (4, 6, 4, 4, 4, 4)
    ids = [sum(range(rows)) + rows * i for i, rows in enumerate(sizes)]
    # Row i of batch i has weight 0: the first one that counts stands there.
    for i, rows in enumerate(sizes):
        ids[i] += (0 if i % rows else 1) - i % rows
    assert aux["ids"].tolist() == ids
    assert aux["worst"][0].shape == (6, 2)
    replicated = cases.asynchronous(replicas=(1, 1, 2))
    assert replicated["ids"].tolist() == ids
    np.testing.assert_array_equal(replicated["worst"][0][0], aux["worst"][0][0])


def test_auxiliary_outputs_of_an_epoch():
    """One array for the whole epoch; a batch of other shapes is refused by number."""
    stage = pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))
    runtime = asynchronous(
        [stage], lambda y, b: (y, 2 * b["x"]), optimizer=optim.sgd(lr=0.1), has_aux=True
    )
    batches = [{"x": np.array([1.0, i])} for i in range(3)]
    state = runtime.init([jnp.array(3.0)])
    state, metrics = runtime.train_epoch(state, batches)
    assert metrics.aux.tolist() == [[2, 0], [2, 2], [2, 4]]
    batches[2] = {"x": np.array([1.0])}
    with pytest.raises(ValueError, match=r"Got float64\[1\] for micro-batch 2"):
        runtime.train_epoch(state, batches)


# --- what is refused ---


def returning(result):
    return pipeline.Pipeline(
        [pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))],
        lambda y, batch: result(y),
        pipeline.gpipe(1, 2),
        has_aux=True,
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda y: y, r"must return the tuple \(losses, aux\). Got an array"),
        (lambda y: (y, y, y), r"the tuple \(losses, aux\). Got a tuple of 3"),
        (
            lambda y: (y, y),
            r"same shapes for all .* float64\[2\]. Got float64\[1\] for",
        ),
        (lambda y: (y.sum(), y), "must return one real loss per example"),
    ],
)
def test_what_a_loss_function_must_return(result, message):
    pipe, batch = returning(result), {"x": jnp.arange(3.0)}
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad([jnp.array(2.0)], batch)


def test_other_things_than_arrays():
    pipe = returning(lambda y: (y, {"name": "text"}))
    with pytest.raises(TypeError, match=r"<class 'str'> at .*\['name'\]") as caught:
        pipe.value_and_grad([jnp.array(2.0)], {"x": jnp.arange(3.0)})
    assert caught.value.__notes__[0] == "It was raised by the loss function."


def test_one_program_has_none():
    mesh = Mesh(np.array(jax.devices()[:3]), ("stage",))
    with pytest.raises(
        ValueError, match=r"has_aux=...\)` must be False where one prog"
    ):
        made(pipeline.one_f_one_b(3, 3), pipeline.OneProgram(mesh))


def test_entries_of_several_processes():
    parts = [stacked({2: np.int32(7)}, np.stack), None, stacked({}, np.stack)]
    assert merged(parts).tolist() == [7]
    parts.append(stacked({3: np.int32(8), 0: np.int32(5)}, np.stack))
    assert merged(parts).tolist() == [5, 7, 8]
    assert merged([None]) is None
