"""The matrix's rows over two processes: judged, refused, and gone without a trace."""

import os
import signal
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jdist import Unavailable, rpc
from jdist._errors import JdistError
from jdist.matrix import processes
from jdist.verify.problem import standard

PROBLEM = standard(jnp.float64)


def request_of(loss_fn):
    arrays = (PROBLEM.params, PROBLEM.batch, PROBLEM.weights)
    return loss_fn, {"reduction": "mean", "method": "all_reduce"}, *arrays


def one_number(params, batch):
    return PROBLEM.loss_fn(params, batch).mean()


@pytest.fixture(scope="module")
def pair():
    made = processes.ReplicaPair()
    yield made
    made.close()


def test_both_rows_are_right(pair, monkeypatch):
    """On the matrix's own problem, by both methods."""
    monkeypatch.setattr(processes, "_pair", lambda: pair)
    rows = processes.rows()
    assert list(rows) == [
        "data_parallel all_reduce x2 processes",
        "data_parallel all_gather x2 processes",
    ]
    made = {name: build(PROBLEM.loss_fn, "mean") for name, build in rows.items()}
    candidates = {
        name: lambda p, b, fn=fn: fn(p, b, PROBLEM.weights) for name, fn in made.items()
    }
    replace(PROBLEM, candidates=candidates).judge().raise_if_failed()


def test_what_a_process_raises_is_raised_here(pair):
    """And they go on afterwards."""
    with pytest.raises(ValueError, match="must return one real loss per example"):
        pair.gradient(*request_of(one_number))
    loss, _ = pair.gradient(*request_of(PROBLEM.loss_fn))
    assert loss.dtype == jnp.float64


def test_the_judge_is_no_worker_between_two_gradients(pair):
    """Other rows make workers in its process."""
    pair.gradient(*request_of(PROBLEM.loss_fn))
    with rpc.local_cluster(["a", "b"]):
        assert rpc.rpc_sync("b", max, args=(1, 2)) == 2
    pair.gradient(*request_of(PROBLEM.loss_fn))


def test_processes_that_are_gone_are_said_to_be():
    """With how they ended; closing finds nothing more to do."""
    made = processes.ReplicaPair()
    os.kill(made.pids[1], signal.SIGKILL)
    expected = r"the two processes are gone: .*Rank 1 .*was killed by SIGKILL"
    with pytest.raises(JdistError, match=expected):
        made.gradient(*request_of(PROBLEM.loss_fn))
    made.close()
    for pid in made.pids:
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(pid, 0)


def fail(rank):
    raise RuntimeError("no such thing here")


def test_processes_that_do_not_start_leave_the_row_out():
    """By name, with the reason."""
    expected = r"(?s)two processes did not start: .*no such thing here"
    with pytest.raises(Unavailable, match=expected):
        processes.ReplicaPair(fail)
