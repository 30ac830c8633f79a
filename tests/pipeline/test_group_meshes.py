"""A stage's mesh over several processes, which do the stage's actions together."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline
from tests.pipeline import group_meshes as group
from tests.pipeline import mesh_models as models
from tests.pipeline.run.test_mesh_features import close, on_one_device
from tests.pipeline.test_worker_meshes import same_bits
from tests.rpc.hosts import Hosts

WIDE = "PP x DP x TP"


@pytest.fixture(scope="module")
def three(fork_server):
    """Three processes: two of them are the first stage, one is the second."""
    hosts = Hosts(fork_server, 3)
    try:
        hosts.everywhere(group.join)
        yield hosts
        hosts.everywhere(group.leave)
    finally:
        hosts.close()


def together(found):
    """The loss and the gradients; the processes of a mesh have the same bits."""
    (loss, first), (again, same), (other, last) = found
    assert loss == again == other
    same_bits(first, same)
    pairs = zip(first, last, strict=True)
    return loss, [a if b is None else b for a, b in pairs]


@pytest.mark.parametrize("kind", ["data", "model"])
@pytest.mark.parametrize("schedule", models.SCHEDULES)
def test_gradients_are_those_of_one_device(three, schedule, kind):
    """Float64; uneven micro-batches, weights, a tied table."""
    found = three.everywhere(group.gradient, schedule, kind, np.float64)
    own, batch, weights = models.problem(dtype=np.float64)
    alone = on_one_device(schedule)
    count = models.SCHEDULES[schedule].stages
    close(together(found), alone.value_and_grad(models.cut(own, count), batch, weights))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_gradients_are_within_the_bound_of_the_whole_batch(three, dtype):
    own, batch, weights = models.problem(dtype=dtype)
    loss, grads = together(three.everywhere(group.gradient, "1F1B", "data", dtype))
    given = {"processes": lambda own, batch: (loss, models.joined(grads))}
    judge = models.judge("mean")
    judge(
        own, batch, given, weights=weights, finite_differences=False
    ).raise_if_failed()


def test_training_is_that_of_one_device(three):
    """Clipped; evaluated with outputs."""
    found = three.everywhere(group.trained, 3, max_norm=0.5)
    own, batch, weights = models.problem(dtype=np.float64)
    alone = on_one_device(optimizer=optim.adam(lr=0.05), max_norm=0.5)
    state, told = alone.init(models.cut(own, 2)), []
    for _ in range(3):
        state, metrics = alone.train_step(state, batch, weights)
        told.append((float(metrics.loss), float(metrics.grad_norm)))
    expected = alone.evaluate(state, batch, weights, outputs=True)
    for losses, params, loss, outputs in found:
        np.testing.assert_allclose(losses, told, rtol=1e-11)
        np.testing.assert_allclose(loss, expected.loss, rtol=1e-11)
        for tree, like in zip(params, state.params, strict=True):
            if tree is not None:
                close(tree, like, rtol=1e-9)
        if outputs is not None:
            np.testing.assert_allclose(outputs, expected.outputs, rtol=1e-9)
    assert [each[-1] is not None for each in found] == [False, False, True]


def test_two_stages_of_a_worker_in_v_form(three):
    """DualPipeV: values pass within a worker and between workers, both ways."""
    found = three.everywhere(group.in_v_form)
    own, batch, weights = models.problem()
    alone = on_one_device("interleaved")
    loss, grads = alone.value_and_grad(models.cut(own, 4), batch, weights)
    for rank, (told, stages) in enumerate(found):
        np.testing.assert_allclose(told, loss, rtol=1e-5)
        here = [1, 2] if rank == 2 else [0, 3]
        assert [j for j, tree in enumerate(stages) if tree is not None] == here
        pairs = ((stages[j], grads[j]) for j in here)
        for a, b in zip(*map(jax.tree.leaves, zip(*pairs, strict=True)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_states_keys_and_auxiliary_outputs(three):
    """The masks are those of one device."""
    found = three.everywhere(group.states_and_keys)
    params, states, batch, weights = models.stateful_problem()
    alone = models.stateful()
    (loss, aux), grads, left = alone.value_and_grad(
        params, batch, weights, states=states, key=jax.random.key(7)
    )
    for rank, (told, own, kept) in enumerate(found):
        close(told, (loss, aux))
        stage = rank // 2
        close(own[stage], grads[stage])
        assert own[1 - stage] is None
        close(kept[stage], left[stage])


def test_a_checkpoint_goes_on_elsewhere(three, tmp_path):
    """orbax writes from process 0, to which the other stage is sent."""
    folder = str(tmp_path / "saved")
    found = three.everywhere(group.saved, folder)
    assert found == [found[0]] * 3
    steps, (again, through) = found[0]
    assert steps == [2]
    assert again == through
    alone = on_one_device(optimizer=optim.adam(lr=0.05))
    own, batch, weights = models.problem(dtype=np.float64)
    with pipeline.PipelineCheckpoints(folder, alone) as checkpoints:
        state = checkpoints.restore(alone.init(models.cut(own, 2)))
    _, metrics = alone.train_step(state, batch, weights)
    np.testing.assert_allclose(metrics.loss, through, rtol=1e-11)


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved"])
def test_activations_in_flight(three, schedule):
    """As many as the schedule says; bytes as on the same mesh in one process."""
    found = three.everywhere(group.timed, schedule)
    pipe, place = models.made(WIDE, schedule)
    own, batch, weights = models.problem(24)
    params = place(own)
    _, timeline = pipeline.timed(
        pipe, lambda: pipe.value_and_grad(params, batch, weights)
    )
    for promised, counted, size in found:
        assert counted == promised
        assert size == timeline.activation_bytes


def test_a_batch_that_differs_is_refused_and_the_next_is_right(three):
    """Before any collective: the processes of a mesh stay in step."""
    found = three.everywhere(group.disagreeing)
    for message, loss in found:
        assert "must be given the same batch" in message
        assert loss == found[0][1]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_error_before_the_first_program_is_everybodys(three, who):
    found = three.everywhere(group.failing, who, False)
    for said, loss in found:
        assert "planted" in said
        assert loss == found[0][1]


def test_what_is_refused(three):
    for said in three.everywhere(group.refusals):
        assert "must have a device of each process: one" in said["left out"]
        assert "no device of the processes [2]" in said["left out"]
        assert "must have the devices of a process at one worker" in said["twice"]
        assert "processes [1] at several workers" in said["twice"]
        assert "must be meshes, where they are in several" in said["devices"]
        assert "meshes of one process each with an asynchronous" in said["updates"]


@pytest.fixture
def doomed(fresh_hosts):
    """Three more, for tests after which they are of no use."""
    hosts = fresh_hosts(3)
    hosts.everywhere(group.join, heartbeat_timeout=3.0)
    return hosts


def test_an_error_under_way_ends_the_run(doomed):
    """What is left of a collective would take up the values of the next one."""
    found = doomed.everywhere(group.failing, 1, True)
    for said, again in found:
        assert "planted" in said
        assert "must not be called again after a call that failed under way" in again
        assert "Start the run again from its last checkpoint" in again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
@pytest.mark.parametrize("who", [1, 2])
def test_a_process_that_is_lost_is_named(doomed, number, who):
    """Also to the one that is in a collective with it: neither waits for ever."""
    others = [rank for rank in range(3) if rank != who]
    tasks = [doomed.start(rank, group.until_lost) for rank in others]
    doomed.start(who, group.gone_after_steps, number)
    doomed.alive.discard(who)
    for task in tasks:
        name, text, seconds = task.result()
        assert name == f"worker{who}"
        assert "value_and_grad, call 2 of a pipeline" in text
        assert seconds < 30
