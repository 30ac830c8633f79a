"""The script of the design note, started in the two ways that need no experiment."""

import os
import subprocess
import sys

import numpy as np
import pytest

from experiments import dist_autograd_simple as script
from jdist.rpc import new_cluster_key
from jdist.rpc.group.rendezvous import ReservedPort
from tests.experiments.quick import ROOT

MODULE = "experiments.dist_autograd_simple"
SAYS = "variables are one device's."


def plain(**variables):
    """The environment of a user."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return {**kept, "COLUMNS": "200", **variables}


def test_by_launch():
    done = subprocess.run(
        [sys.executable, "-m", "jdist.launch", "--nproc", "2", "-m", MODULE],
        capture_output=True, text=True, timeout=200, cwd=ROOT, env=plain(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"worker{rank}: losses" in done.stdout
    assert done.stdout.count(SAYS) == 2


def test_by_hand():
    """Two terminals, with MASTER_ADDR and MASTER_PORT."""
    with ReservedPort() as reserved:
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(reserved.port),
            "JDIST_CLUSTER_KEY": new_cluster_key(),
            "WORLD_SIZE": "2",
        }
        started = [
            subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                env=plain(**variables, RANK=str(rank)),
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            told = [process.communicate(timeout=200) for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    assert all(SAYS in out for out, _ in told)


def test_one_device_is_the_formula():
    """The gradient of the squared distance is twice the distance."""
    found = script.one_device(0, 1, 5)
    first, second, target = (script.random_numbers((5, 0, i)) for i in range(3))
    distance = first + second - target
    for value, before, gradient in zip(
        found.values, (first, second), found.gradients, strict=True
    ):
        np.testing.assert_array_equal(gradient, 2 * distance)
        np.testing.assert_allclose(
            value, before - np.float32(0.05) * 2 * distance, rtol=1e-6
        )


@pytest.mark.parametrize(("what", "index"), [("gradients", 0), ("values", 1)])
def test_one_wrong_bit_is_seen(what, index):
    """The claims can fail."""
    alone = [script.one_device(rank, 2, 5) for rank in (0, 1)]
    assert [claim.holds for claim in script.judged(alone, alone)][:2] == [True, True]
    wrong = [np.nextafter(x, np.float32(9)) for x in getattr(alone[1], what)]
    claims = list(script.judged([alone[0], alone[1]._replace(**{what: wrong})], alone))
    assert [claim.holds for claim in claims[:2]] == [index != 0, index != 1]
