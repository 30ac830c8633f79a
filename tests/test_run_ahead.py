"""The host stays a few steps ahead of CPU devices that share XLA's threads."""

import os

import jax
import pytest

from jdist import rpc
from jdist._compat import is_computed
from jdist._compat.run_ahead import IN_FLIGHT
from tests import run_ahead_cases


@pytest.mark.parametrize("case", run_ahead_cases.CASES, ids=lambda case: case.__name__)
def test_few_steps_are_in_flight(case):
    """All but the last ones are computed when a step returns, though nothing is read.

    With 32 in flight the next launch holds threads that the running step lacks.
    """
    steps = run_ahead_cases.losses(case, jax.devices()[:2])
    found, most = [], 0
    for _ in range(2 * IN_FLIGHT):
        found.append(next(steps))
        most = max(most, sum(not is_computed(loss) for loss in found))
    assert most < IN_FLIGHT


@pytest.mark.parametrize("name", [case.__name__ for case in run_ahead_cases.CASES])
def test_no_loop_is_ended_by_xla(monkeypatch, name):
    """Sixty steps, with as many threads as devices.

    XLA would end the process: "Termination timeout for `all reduce ..`".
    """
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("PJRT_NPROC", "2")
    seconds = "--xla_cpu_collective_call_terminate_timeout_seconds=10"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {seconds}"
    monkeypatch.setenv("XLA_FLAGS", flags)
    given = {"args": (name, 60), "nprocs": 1, "settings": None, "timeout": 280}
    assert rpc.spawn(run_ahead_cases.finite, **given) == [60]
