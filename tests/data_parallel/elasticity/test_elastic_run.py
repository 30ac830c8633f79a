"""Elastic runs: every history gives the losses and parameters of none."""

import gc
import os
import random
import re
import signal
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import data_parallel, optim, rpc
from jdist.data_parallel import Sampler
from jdist.data_parallel.elasticity.replica_group import LeaderService
from jdist.data_parallel.elasticity.replica_work import ReplicaWork
from jdist.rpc.group.rendezvous import ReservedPort
from tests.data_parallel.elasticity.histories import (
    EXAMPLES,
    PARAMS,
    WEIGHTS,
    Died,
    Finished,
    History,
    Watched,
    X,
    Y,
    curved_loss,
    elastic_run,
    exact_loss,
    exact_run,
)
from tests.rpc.elastic.common import Elastic, Processes


def drawn(seed):
    """A history of 2 to 5 replicas; worker 0 stays."""
    choose = random.Random(seed)
    replicas = choose.randint(2, 5)
    mortal = choose.sample(range(1, replicas), choose.randint(1, replicas - 1))
    deaths = {number: choose.randint(1, 6) for number in mortal}
    joins = choose.sample(range(1, 6), choose.randint(0, 2))
    return {"replicas": replicas, "deaths": deaths, "joins": joins}


HISTORIES = [
    {"replicas": 3},  # 16 examples over 3 replicas
    {"replicas": 3, "deaths": {1: 2}, "joins": [3]},
    {"replicas": 4, "deaths": {1: 3, 3: 3}},  # two at once
    *(drawn(seed) for seed in range(3)),
]


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_each_example_counts_once_whatever_happens(history):
    """The sums are exact: no order of theirs hides an example."""
    params, losses = exact_run(6)
    history = History(elastic_run(exact_loss, "sum"), **history)
    found = history.finished()
    assert 0 in found
    for state, own in found.values():
        for name, value in params.items():
            assert state.params[name].tolist() == np.asarray(value).tolist()
        assert own == {step: losses[step] for step in own}
    assert list(found[0].losses) == list(range(6))


@pytest.mark.parametrize("history", HISTORIES[1:4], ids=str)
def test_in_a_fixed_order_every_history_has_the_same_bits(history):
    run = elastic_run(curved_loss, "mean", slots=5)
    alone = History(run, replicas=1).finished()[0]
    for state, losses in History(run, **history).finished().values():
        assert losses == {step: alone.losses[step] for step in losses}
        for one, other in zip(
            jax.tree.leaves(state), jax.tree.leaves(alone.state), strict=True
        ):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_a_step_is_that_of_value_and_grad(reduction):
    run = data_parallel.Elastic(
        curved_loss, optim.sgd(lr=1.0), Sampler(EXAMPLES, 37), reduction=reduction
    )
    history = History(run, 3, epochs=1, min_replicas=3)
    (state, losses), *_ = history.finished().values()
    k = jnp.array(WEIGHTS, jnp.float32)

    def reduced(params):
        found = curved_loss(params, (X, Y))
        if reduction in ("mean", "sum"):
            return k @ found / (k.sum() if reduction == "mean" else 1)
        pick, far = (jnp.max, -jnp.inf) if reduction == "max" else (jnp.min, jnp.inf)
        return pick(jnp.where(k > 0, found, far))

    loss, gradient = jax.value_and_grad(reduced)(PARAMS)
    each = jax.jacobian(lambda params: curved_loss(params, (X, Y)))(PARAMS)
    # Every order of 37 summands errs by 37 eps of the sum of their sizes at most; a
    # summand by some eps of its own terms, of which there are less than 37.
    count = (
        k / k.sum() if reduction == "mean" else jnp.where(k > 0, jnp.maximum(k, 1), 0)
    )
    eps = 37 * 2 * float(jnp.finfo(jnp.float32).eps)
    assert abs(losses[0] - loss) <= eps * float(count @ curved_loss(PARAMS, (X, Y)))
    for name, leaf in gradient.items():
        sizes = jnp.tensordot(count, jnp.abs(each[name]), 1) + jnp.abs(PARAMS[name])
        wanted = PARAMS[name] - leaf
        assert jnp.all(jnp.abs(state.params[name] - wanted) <= eps * sizes)


def test_a_deadline_shorter_than_compilation_costs_no_example():
    params, losses = exact_run(6)
    run = elastic_run(exact_loss, "sum", timeout=0.01)
    results = History(run, replicas=3).results.values()
    finished = [one for one in results if isinstance(one, Finished)]
    assert finished
    for state, own in finished:
        assert own == {step: losses[step] for step in own}
        assert state.params["w"].tolist() == params["w"].tolist()
    for late in (one for one in results if isinstance(one, Exception)):
        assert "was over" in str(late) or "is over" in str(late)


def test_all_but_rank_0_die_and_the_run_goes_on():
    history = History(elastic_run(exact_loss, "sum"), 3, deaths={1: 1, 2: 1})
    assert list(history.finished()[0].losses.values()) == exact_run(6)[1]
    assert isinstance(history.results[1], Died)
    assert isinstance(history.results[2], Died)


def test_without_rank_0_the_run_ends_and_goes_on_from_a_checkpoint(tmp_path):
    run = elastic_run(exact_loss, "sum", folder=tmp_path, save_every=100)
    history = History(run, 3, deaths={0: 4}, min_replicas=3)
    assert all(isinstance(history.results[n], rpc.RpcError) for n in (1, 2))
    again = History(run, 1).finished()[0]
    _, losses = exact_run(6)
    assert again.losses == dict(enumerate(losses[3:], 3))


def test_no_replica_takes_the_shares_of_rank_0_when_it_leaves(tmp_path):
    """Replica 1, which writes the checkpoint then, has reported; replica 2 has not."""
    pauses = {
        0: {4: _Call(partial(time.sleep, 0.4))},
        2: {4: _Call(partial(time.sleep, 1))},
    }
    run = elastic_run(exact_loss, "sum", folder=tmp_path, save_every=100)
    History(run, 3, deaths={0: 4}, pauses=pauses, min_replicas=3)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_replica_whose_loss_fails_leaves_the_others_to_go_on():
    class Broken(Exception):
        pass

    def fail():
        raise Broken

    history = History(elastic_run(exact_loss, "sum"), 3, pauses={2: {1: _Call(fail)}})
    assert isinstance(history.results[2], Broken)
    assert list(history.results[0].losses.values()) == exact_run(6)[1]


def test_what_rank_0_cannot_add_up_is_told_to_all(monkeypatch):
    def total(work, sums):
        raise MemoryError("no room")

    monkeypatch.setattr(ReplicaWork, "total", total)
    results = History(elastic_run(exact_loss, "sum"), 3, min_replicas=3).results
    assert len(results) == 3
    for error in results.values():
        message = "Rank 0 could not add up a step's gradient: MemoryError('no room')"
        assert isinstance(error, rpc.RpcError)
        assert message in str(error)


def test_a_finished_run_keeps_no_state():
    """The group goes on, and the deadline of the last step is an hour away."""

    def kept():
        gc.collect()
        return [x for x in gc.get_objects() if type(x) in (LeaderService, ReplicaWork)]

    before = len(kept())
    run = elastic_run(exact_loss, "sum", timeout=3600.0)
    with rpc.elastic_cluster("w0"), rpc.use_worker("w0"):
        _, losses = run.run(PARAMS, (X, Y), WEIGHTS)
        assert losses
        assert len(kept()) == before


def test_a_run_does_not_wait_for_replicas_for_ever():
    run = elastic_run(exact_loss, "sum")
    message = (
        "No step could begin for 1 s: 2 of the replicas were ready, and "
        "`Elastic.run(min_replicas=...)` is 3. Start more workers, or give a longer "
        "`Elastic.run(join_timeout=...)`."
    )
    for error in History(run, 2, min_replicas=3, join_timeout=1.0).results.values():
        assert isinstance(error, rpc.RpcError)
        assert message in str(error)


def test_a_replica_does_not_wait_for_rank_0_for_ever():
    run = elastic_run(exact_loss, "sum")
    with rpc.elastic_cluster("w0") as join:
        join("w1")
        with (
            rpc.use_worker("w1"),
            pytest.raises(rpc.RpcError, match="Rank 0 has not begun the elastic run"),
        ):
            run.run(PARAMS, (X, Y), WEIGHTS, join_timeout=0.1)
        _, losses = run.run(PARAMS, (X, Y), WEIGHTS)  # The other one has left it.
        assert losses


class _Call:
    def __init__(self, function):
        self._function = function

    def wait(self, seconds):
        self._function()


# --- between processes ---


def train(number, dies_at, death):
    """One replica in a process of its own; it kills itself in that share."""

    def before(shares):
        if shares == dies_at:
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # On a busy machine the one that dies may come late: the others would be through
        # without it. They cannot wait longer within a step that it has no part in.
        until = time.monotonic() + 2
        while shares > 2 and not death.exists() and time.monotonic() < until:
            time.sleep(0.01)

    run = elastic_run(exact_loss, "sum")
    data = (Watched(X, before), Y)
    state, losses = run.run(PARAMS, data, WEIGHTS, epochs=2, min_replicas=2)
    return state.params["w"].tolist(), losses


def test_a_killed_process_costs_no_example(fresh_hosts, tmp_path):
    params, losses = exact_run(6)
    death = tmp_path / "death"
    with ReservedPort() as reserved:
        group = Elastic(Processes(fresh_hosts(3), reserved.port))
        for number in range(3):
            group.join(f"worker{number}")
        dying = group.start("worker2", train, 2, 2, death)
        others = [group.start(f"worker{n}", train, n, None, death) for n in range(2)]
        applied = {}
        for task in others:
            found, own = task.result()
            assert found == params["w"].tolist()
            # Of the three, one may have come when two had taken the first steps.
            assert list(own) == list(range(min(own), 6))
            assert own.items() <= dict(enumerate(losses)).items()
            applied |= own
        assert applied == dict(enumerate(losses))
    with pytest.raises(EOFError):  # noqa: PT011 - its process has ended
        dying.result(5)


def test_masters_are_the_parameters_in_full_precision():
    """And take the gradient in the precision of its sum: 257 is no bfloat16."""
    opt = optim.with_master_weights(optim.sgd(lr=1.0), compute_dtype=jnp.bfloat16)
    sampler = Sampler(3, 3, shuffle=False)
    run = data_parallel.Elastic(lambda w, x: x @ w, opt, sampler, reduction="sum")
    x = np.array([[256, 2], [1, 512], [0, 1]], jnp.bfloat16)
    with rpc.elastic_cluster():
        state, _ = run.run(jnp.array([1.0001, 2.0003], jnp.float32), x)
    expected = np.float32([1.0001, 2.0003]) - np.float32([257, 515])
    assert state.opt_state.masters.tolist() == expected.tolist()
    assert state.params.tolist() == expected.astype(jnp.bfloat16).tolist()


# --- refusals ---


def test_a_loss_scale_is_refused():
    """No replica would multiply by it, and each step would divide."""
    scaled = optim.with_master_weights(optim.sgd(), loss_scale=8.0)
    message = "Elastic(optimizer=...)` must have no loss scale"
    with pytest.raises(ValueError, match=re.escape(message)):
        data_parallel.Elastic(exact_loss, scaled, Sampler(EXAMPLES, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 17}, "`Elastic(slots=...)` must be from 1 to the sampler's batch,"),
        (
            {"slots": 0},
            "`Elastic(slots=...)` must be from 1 to the sampler's batch, 16",
        ),
        ({"save_every": 2}, "`Elastic(save_every=...)` must be None where there is no"),
        ({"timeout": 0.0}, "`Elastic(timeout=...)` must be a positive number of sec"),
        ({"reduction": "median"}, "`Elastic(reduction=...)` must be one of 'mean',"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        elastic_run(exact_loss, **{"reduction": "mean"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"min_replicas": 0},
            "`Elastic.run(min_replicas=...)` must be at least 1. Got",
        ),
        ({"join_timeout": -1.0}, "`Elastic.run(join_timeout=...)` must be a positive"),
        ({"epochs": 0}, "`Elastic.run(epochs=...)` must be at least 1. Got 0."),
        (
            {"data": (X[:9], Y[:9])},
            "`Elastic.run(data=...)` must have the sampler's 37",
        ),
    ],
)
def test_a_run_out_of_range_is_refused(options, message):
    given = {"params": PARAMS, "data": (X, Y)} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        elastic_run(exact_loss, "mean").run(**given)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (WEIGHTS[:5], "`Elastic.run(weights=...)` must be one per row, shape (37,)."),
        (-WEIGHTS, "`Elastic.run(weights=...)` must be finite and at least 0. Got -1."),
        (0 * WEIGHTS, "must have a positive weight in every batch. Got none in that"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        elastic_run(exact_loss, "mean").run(PARAMS, (X, Y), weights)


def test_a_replica_with_other_terms_and_a_second_run_are_refused():
    run = elastic_run(exact_loss, "sum")
    over = threading.Event()
    refused = []

    def come():
        with rpc.use_worker("w1"):
            for other in (elastic_run(exact_loss, "mean"), run, run):
                try:
                    other.run(PARAMS, (X, Y), WEIGHTS)
                except (ValueError, rpc.RpcError) as error:
                    refused.append(str(error))
                else:
                    # Until rank 0 has ended the run, it hands a late replica its state.
                    over.wait(60)

    with rpc.elastic_cluster("w0") as join:
        join("w1")
        thread = threading.Thread(target=come)
        thread.start()
        run.run(PARAMS, (X, Y), WEIGHTS, min_replicas=2)
        over.set()
        thread.join(60)
        with pytest.raises(ValueError, match="the run of that name has begun"):
            run.run(PARAMS, (X, Y), WEIGHTS)
    other, again = refused
    assert "must have the same reduction on all workers, sum as on rank 0" in other
    assert "'elastic' is over on rank 0" in again


def test_no_worker_no_run():
    with pytest.raises(rpc.RpcError, match="RPC"):
        elastic_run(exact_loss, "sum").run(PARAMS, (X, Y))
