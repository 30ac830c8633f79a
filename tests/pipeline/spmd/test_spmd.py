"""One program for all stages: the whole batch's gradient, on devices of one process."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import optim, pipeline, verify
from tests.pipeline.spmd_models import (
    close,
    losses,
    noisy,
    problem,
    stages,
    whole_gradient,
    whole_losses,
)


def mesh(count, *shape):
    devices = np.array(jax.devices()[:count])
    names = ("stage", "other")[: len(shape) or 1]
    return Mesh(devices.reshape(shape or count), names)


def in_one(count, *shape, **options):
    return pipeline.OneProgram(mesh(count, *shape), **options)


def made(schedule, reduction="mean", places=None, overlap=False, **options):
    return pipeline.Pipeline(
        stages(schedule.stages),
        losses,
        schedule,
        places or in_one(schedule.workers, overlap=overlap),
        reduction=reduction,
        **options,
    )


SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(4, 5),
    "zero bubble": pipeline.zero_bubble(4, 3),
    "interleaved": pipeline.interleaved(2, 4, 2),
    "DualPipeV": pipeline.dualpipe_v(2, 4),
}


def test_gradient_of_the_whole_batch():
    """Eleven examples, so that micro-batches are padded; weights, one of them 0."""
    params, batch, weights = problem(4, 11)
    found = {
        name: made(schedule).value_and_grad(params, batch, weights)
        for name, schedule in SCHEDULES.items()
    }
    verify.gradients(
        whole_losses,
        params,
        batch,
        {name: lambda *_, own=own: own for name, own in found.items()},
        weights=weights,
    ).raise_if_failed()
    assert found["1F1B"][1][0]["steps"] is None
    assert not found["1F1B"][1][1]["unused"].any()


@pytest.mark.parametrize(
    ("schedule", "reduction"),
    [
        (pipeline.one_f_one_b(2, 4), "sum"),
        (pipeline.gpipe(2, 4), "max"),
        (pipeline.zero_bubble(2, 4), "min"),
        (pipeline.looped_bfs(1, 4, 2), "mean"),
    ],
    ids=str,
)
def test_every_reduction(schedule, reduction):
    """In float64; the extreme example is in one micro-batch of four, and all know."""
    params, batch, weights = problem(2, 7, 1, np.float64)
    found = made(schedule, reduction).value_and_grad(params, batch, weights)
    close(found, whole_gradient(params, batch, weights, reduction))


@pytest.fixture(scope="module")
def trained():
    """A pipeline in one program that has taken a step, and the same on one device."""
    options = {"optimizer": optim.adam(lr=1e-2), "max_norm": 0.5}
    schedule = pipeline.one_f_one_b(2, 3)
    one, other = (
        made(schedule, places=p, **options)
        for p in (in_one(2), [jax.devices("cpu")[0]] * 2)
    )
    params, batch, weights = problem(2, 7, dtype=np.float64)
    states = [pipe.init(params) for pipe in (one, other)]
    found = one.train_step(states[0], batch, weights)
    return one, other, states, found, (batch, weights)


def test_training_is_that_of_the_other_executors(trained):
    """Float64: clipped by the norm of both stages, updated each on its device."""
    one, other, (_, state), (mine, metrics), (batch, weights) = trained
    for _ in range(2):
        state, expected = other.train_step(state, batch, weights)
        close(metrics, expected)
        close((mine.params, mine.opt_states), (state.params, state.opt_states))
        mine, metrics = one.train_step(mine, batch, weights)
    for stage, own in enumerate(mine.params):
        assert {x.device for x in jax.tree.leaves(own)} == {jax.devices()[stage]}


def test_a_step_donates_its_state(trained):
    _, _, (before, _), _, _ = trained
    assert all(x.is_deleted() for x in jax.tree.leaves(before.params))


def test_nothing_compiles_twice(trained, caplog):
    one, _, _, _, (batch, weights) = trained
    params, _, _ = problem(2, 7, 3, np.float64)
    state, _ = one.train_step(one.init(params), batch, weights)
    again = {name: entry[::-1] for name, entry in batch.items()}
    with jax.log_compiles():
        state, first = one.train_step(state, again, weights)
        _, second = one.train_step(state, batch, weights[::-1])
    assert not [r for r in caplog.records if "Compiling" in r.message]
    assert first.loss != second.loss


@pytest.fixture(scope="module")
def compiled():
    """By family and micro-batches; a matrix is 16 times as large as a value."""
    found = {}
    for family in (pipeline.gpipe, pipeline.one_f_one_b):
        for count in (4, 8):
            params, batch, weights = problem(2, 2 * count, width=32)
            pipe = made(family(2, count))
            lowered = pipe.lower(params, batch, weights)["all stages: gradient"]
            found[family.__name__, count] = lowered.compile()
    return found


def test_memory_follows_the_schedules_bound(compiled):
    """Slots hold activations and no weights: GPipe's grow with its micro-batches."""
    size = {
        key: program.memory_analysis().temp_size_in_bytes
        for key, program in compiled.items()
    }
    # Of 1F1B only the tables are longer, by a few numbers for each clock.
    assert size["one_f_one_b", 8] - size["one_f_one_b", 4] < 1024
    # A slot has the input and three values more; and one more waits for its action.
    rows = 2 * 32 * 4
    assert size["gpipe", 8] - size["gpipe", 4] <= 4 * (4 + 1) * rows


def test_one_permutation_serves_both_ways(compiled):
    """Of two workers each is the other's neighbour on both sides."""
    for program in compiled.values():
        assert program.as_text().count(" collective-permute(") == 1


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_beside_actions_change_nothing(name, reduction):
    """The order of sums stays: the bits are the same."""
    params, batch, weights = problem(4, 11)
    loss, grads = made(SCHEDULES[name], reduction, overlap=True).value_and_grad(
        params, batch, weights
    )
    expected = made(SCHEDULES[name], reduction).value_and_grad(params, batch, weights)
    found = jax.tree.leaves((loss, grads))
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- keys ---


def noisy_pipeline(schedule, one=True, recompute=False, **options):
    """Stages with dropout, in one program or on devices."""
    made_of = stages(schedule.stages, noisy, keyed=True, recompute=recompute)
    places = in_one(schedule.workers) if one else jax.devices()[: schedule.workers]
    return pipeline.Pipeline(made_of, losses, schedule, places, **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_keys_are_those_of_the_other_executors(name, recompute):
    """Padded rows draw as well; float64, so that one mask would be seen."""
    params, batch, weights = problem(4, 11, dtype=np.float64)
    key = jax.random.key(3)
    found, expected = (
        pipe.value_and_grad(pipe.place(params), batch, weights, key=key)
        for pipe in (
            noisy_pipeline(SCHEDULES[name], one, recompute) for one in (True, False)
        )
    )
    close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected))


def test_a_gradient_with_keys_is_that_of_the_same_masks():
    """Written out: micro-batch m of stage j draws from fold_in(fold_in(key, j), m)."""
    params, batch, weights = problem(2, 8, dtype=np.float64)
    key = jax.random.key(4)
    pipe = noisy_pipeline(pipeline.one_f_one_b(2, 4))
    found = pipe.value_and_grad(params, batch, weights, key=key)

    def mean(floating):
        total = 0.0
        for m in range(4):
            rows = slice(2 * m, 2 * m + 2)
            h = batch["x"][rows]
            for j, own in enumerate(floating):
                drawn = jax.random.fold_in(jax.random.fold_in(key, j), m)
                h = noisy({**own, "steps": params[j]["steps"]}, h, drawn)
            each = losses(h, {"target": batch["target"][rows]})
            total += (each * weights[rows]).sum()
        return total / weights.sum()

    floating = [{k: x for k, x in own.items() if k != "steps"} for own in params]
    loss, grads = jax.value_and_grad(mean)(floating)
    close(found, (loss, [{**own, "steps": None} for own in grads]))


@pytest.mark.parametrize(
    "key",
    [jax.random.key(5, impl="rbg"), jax.random.PRNGKey(5)],
    ids=["rbg", "raw"],
)
def test_keys_of_every_kind(key):
    params, batch, weights = problem(2, 8, dtype=np.float64)
    schedule = pipeline.one_f_one_b(2, 4)
    one, other = (noisy_pipeline(schedule, in_one, True) for in_one in (True, False))
    found = one.value_and_grad(params, batch, weights, key=key)
    expected = other.value_and_grad(other.place(params), batch, weights, key=key)
    close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected))


def test_training_draws_anew_in_each_step(caplog):
    params, batch, weights = problem(2, 8, dtype=np.float64)
    options = {"optimizer": optim.sgd(lr=0.0)}
    schedule = pipeline.one_f_one_b(2, 4)
    losses_of = []
    for in_one in (True, False):
        pipe = noisy_pipeline(schedule, in_one, **options)
        state = pipe.init(params, key=jax.random.key(6))
        state, first = pipe.train_step(state, batch, weights)
        with jax.log_compiles():
            state, second = pipe.train_step(state, batch, weights)
        losses_of.append((float(first.loss), float(second.loss)))
    assert not [r for r in caplog.records if "Compiling" in r.message]
    mine, expected = losses_of
    np.testing.assert_allclose(mine, expected, rtol=1e-12)
    assert mine[0] != mine[1]


def test_the_program_is_lowered_with_a_key():
    params, batch, weights = problem(2, 8)
    pipe = noisy_pipeline(pipeline.one_f_one_b(2, 4))
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = pipe.lower(params, batch, weights, key=key)["all stages: gradient"]
    assert lowered.compile().memory_analysis()


def test_a_key_must_be_given():
    pipe = noisy_pipeline(pipeline.one_f_one_b(2, 4))
    expected = "must be given, because stage 0 takes a PRNG key"
    with pytest.raises(ValueError, match=expected):
        pipe.value_and_grad(*problem(2, 8))


# --- what is refused ---


def changed(**changes):
    first, second = stages(2)
    return [first, dataclasses.replace(second, **changes)]


@pytest.mark.parametrize(
    ("made_of", "expected"),
    [
        (changed(fn=lambda p, h: h), "same function .* Got another one in stage 1"),
        (changed(recompute=True), "same `recompute` .* Got True in stage 1"),
        (changed(keyed=True), "same `keyed` .* Got True in stage 1, False before"),
        (changed(stateful=True), "have no state .* Got a state in stage 1"),
        (changed(tied={"w": "shared"}), "share no parameters .* Got {'w': 'shared'}"),
        (changed(inputs=("h1", "x")), r"one input and one output .*\('h1', 'x'\)"),
        (
            changed(inputs=("x",)),
            "the first from the batch .* Got 'x' from the batch in stage 1",
        ),
    ],
)
def test_stages_that_are_not_equal_are_refused(made_of, expected):
    """And the way out is named."""
    # Nobody else takes what the second stage does not.
    options = {} if "h1" in made_of[1].inputs else {"loss_inputs": ("h1", "y")}
    remedy = "Or give a list of devices, or Workers"
    with pytest.raises(ValueError, match=f"{expected}.*{remedy}"):
        pipeline.Pipeline(made_of, losses, pipeline.gpipe(2, 2), in_one(2), **options)


def test_a_schedule_that_shares_unequally_is_refused():
    uneven = pipeline.Schedule.of(
        [["0F0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]], name="uneven"
    )
    expected = r"must give each worker equally many stages\. Got \[1, 2\]"
    with pytest.raises(ValueError, match=expected):
        made(uneven)


def test_replicated_stages_are_refused():
    programs = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"], ["1F1", "1B1"]]
    schedule = pipeline.Schedule.of(programs, placement=((0,), (1, 2)))
    expected = r"must give each stage one worker\. Got workers \(1, 2\) for stage 1"
    with pytest.raises(ValueError, match=expected):
        made(schedule)


def test_nobody_sees_an_action_end():
    pipe = made(pipeline.gpipe(2, 2))
    with pytest.raises(ValueError, match="must have workers or devices of their own"):
        pipeline.timed(pipe, lambda: None)


@pytest.mark.parametrize("places", [in_one(3), in_one(4, 4, 1)], ids=str)
def test_a_mesh_must_have_an_axis_of_the_workers(places):
    expected = "must have an axis 'stage' as long as the schedule has workers, 2"
    with pytest.raises(ValueError, match=expected):
        made(pipeline.gpipe(2, 2), places=places)


def test_the_loss_must_come_last():
    expected = "must end in the loss, which takes 'y' alone .*h1"
    with pytest.raises(ValueError, match=expected):
        made(pipeline.gpipe(2, 2), loss_inputs=("y", "h1"))


def with_first(params, **changes):
    return [params[0], {**params[1], **changes}]


def test_what_does_not_fit_is_refused_before_anything_runs():
    pipe = made(pipeline.gpipe(2, 2))
    params, batch, weights = problem(2, 4)
    other = with_first(params, unused=jnp.ones(3, jnp.float32))
    expected = r"parameters like those of stage 0.*float32\[3\].* in stage 1"
    with pytest.raises(ValueError, match=expected):
        pipe.value_and_grad(other, batch, weights)
    missing = {name: x for name, x in params[1].items() if name != "unused"}
    with pytest.raises(ValueError, match="parameters like those of stage 0"):
        pipe.value_and_grad([params[0], missing], batch, weights)
    with pytest.raises(ValueError, match="must output 'x', or the batch have it"):
        pipe.value_and_grad(params, {"target": batch["target"]}, weights)
    short = {name: entry[:1] for name, entry in batch.items()}
    with pytest.raises(ValueError, match="an example for each of the 2 micro-batches"):
        pipe.value_and_grad(params, short, weights[1:2])
    with pytest.raises(ValueError, match="must not all be zero"):
        pipe.value_and_grad(params, batch, 0 * weights)
    away = {**batch, "x": jax.device_put(batch["x"], jax.devices()[1])}
    with pytest.raises(
        ValueError, match=r"must have 'x' on .*, where stage 0 takes it"
    ):
        pipe.value_and_grad(params, away, weights)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (
            lambda p, h: h @ p["w"][:, :3],
            r"output what they take, 'x': float32\[2,5\]",
        ),
        (lambda p, h: (h @ p["w"]).astype(jnp.bfloat16), r"Got bfloat16\[2,5\] from"),
        (lambda p, h: h.astype(jnp.int32), "Got int32"),
    ],
)
def test_a_stage_must_put_out_what_it_takes(fn, expected):
    made_of = [pipeline.Stage(fn, s.inputs, s.outputs) for s in stages(2)]
    pipe = pipeline.Pipeline(made_of, losses, pipeline.gpipe(2, 2), in_one(2))
    params, batch, weights = problem(2, 4)
    with pytest.raises(ValueError, match=expected):
        pipe.value_and_grad(params, batch, weights)


def test_integers_do_not_pass_from_stage_to_stage():
    made_of = [pipeline.Stage(lambda p, h: h, s.inputs, s.outputs) for s in stages(2)]
    pipe = pipeline.Pipeline(made_of, losses, pipeline.gpipe(2, 2), in_one(2))
    params, batch, _ = problem(2, 4)
    with pytest.raises(
        ValueError, match=r"must pass on floating values .*'x' of int32"
    ):
        pipe.value_and_grad(params, {**batch, "x": np.ones((4, 5), np.int32)})


def test_losses_that_are_no_vector_are_refused():
    pipe = pipeline.Pipeline(
        stages(2), lambda y, batch: y.mean(), pipeline.gpipe(2, 2), in_one(2)
    )
    params, batch, weights = problem(2, 4)
    with pytest.raises(ValueError, match="one real loss per example"):
        pipe.value_and_grad(params, batch, weights)


def test_a_scaled_loss_is_refused():
    scale = optim.DynamicLossScale()
    scaled = optim.with_master_weights(
        optim.sgd(lr=1e-2), compute_dtype=jnp.float32, loss_scale=scale
    )
    pipe = made(pipeline.gpipe(2, 2), optimizer=scaled)
    params, batch, weights = problem(2, 4)
    state = pipe.init(params)
    with pytest.raises(ValueError, match="must not scale the loss where one program"):
        pipe.train_step(state, batch, weights)
