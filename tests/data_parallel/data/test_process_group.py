"""Two real processes: the same gradient, the same bits, and the loss of one."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import _agreement, verify
from jdist.data_parallel.data.process_group import VARIABLES, process_group
from jdist.rpc.base.errors import ProcessFailed
from jdist.rpc.processes.spawn import spawn
from tests.data_parallel import group_runs as runs

process_group_module = sys.modules["jdist.data_parallel.data.process_group"]


def test_the_mesh_is_over_all_devices_of_both(pair):
    """In the order of ranks, the same in both, by the name that was asked for."""
    count = jax.device_count()
    for rank, (axes, devices, index, size) in enumerate(pair.joined):
        assert axes == ("replicas",)
        assert [process for process, _ in devices] == [0] * count + [1] * count
        assert len({number for _, number in devices}) == 2 * count
        assert (index, size) == (rank, 2)


@pytest.mark.parametrize(
    ("sizes", "reduction", "methods"),
    [
        ((7, 4), "mean", ("all_reduce", "all_gather")),
        ((7, 4), "sum", ("all_reduce",)),
        ((7, 4), "min", ("all_gather",)),
        ((3, 0, 5, 2), "mean", ("all_reduce", "all_gather")),
        ((3, 0, 5, 2), "max", ("all_reduce",)),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_one_device(pair, sizes, reduction, methods):
    """Uneven and empty shards, on one device of each process and on two."""
    batch, weights = runs.examples(sum(sizes))
    found = {
        method: pair.everywhere(runs.gradient, sizes, reduction, method)
        for method in methods
    }
    verify.gradients(
        runs.losses_of,
        runs.parameters(),
        batch,
        {
            f"{method}, rank {rank}": lambda p, b, x=x: x
            for method, both in found.items()
            for rank, x in enumerate(both)
        },
        weights=weights,
        reduction=reduction,
    ).raise_if_failed()
    for both in found.values():
        one, other = (jax.tree.leaves(x) for x in both)
        assert [x.tobytes() for x in one] == [x.tobytes() for x in other]


@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_a_float16_mean_is_divided_before_it_is_added_up(pair, method):
    """Finite on both, within a spacing of float16 at 600 of the exact one."""
    for found, expected in pair.everywhere(runs.float16_mean, method):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.75)


def test_parameters_divided_within_each_process_stay_so(pair):
    for kept, found, expected in pair.everywhere(runs.divided):
        assert all(kept)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12)


def test_two_cpus_swap_and_four_reduce(pair):
    """One for the only bucket, losses included, and before it one for the weights."""
    none = dict.fromkeys(runs.KINDS, 0)
    assert pair.everywhere(runs.collectives, 1)[1] == none | {"collective-permute": 2}
    assert pair.everywhere(runs.collectives, 2)[0] == none | {"all-reduce": 2}


def test_swaps_are_not_mixed_up(pair):
    """Sixty of one size in a program, with nothing but its order to tell them apart."""
    assert pair.everywhere(runs.many_swaps, 60, 20) == [0, 0]


@pytest.mark.parametrize("each", [1, 2])
def test_all_copies_stay_the_same_bits(pair, each):
    """After 50 steps on shards of changing sizes; and the run is one process's."""
    (losses, one), (again, other) = pair.everywhere(runs.train, 50, each)
    assert losses == again
    assert len({*one, *other}) == 1
    assert len(one) == len(other) == each
    devices = np.array(jax.devices()[: 2 * each])
    alone, _ = runs.train(50, each, where=Mesh(devices, ("data",)))
    numbers = [[float.fromhex(x) for x in run.values()] for run in (losses, alone)]
    # In float64 rounding grows by a small factor per step.
    np.testing.assert_allclose(*numbers, rtol=1e-9)


def test_a_killed_run_goes_on_where_it_was(pair, tmp_path, rng, monkeypatch):
    """kill -9 at whatever moment it hits; the losses are the same to the bit."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    steps, folder = 7, tmp_path / "saved"
    (uninterrupted, digests), _ = pair.everywhere(runs.train, steps, 1)
    fatal = int(rng.integers(2, 5))
    expected = "Rank 1 .*was killed by SIGKILL before its function returned"
    with pytest.raises(ProcessFailed, match=expected):
        trained(folder, steps, fatal)
    (resumed, one), (_, other) = trained(folder, steps, None)
    assert min(resumed) in (2, 4, 6)  # A step that was saved completely.
    assert one == other == digests
    for rank in range(2):
        log = (tmp_path / f"saved-{rank}.log").read_text().split("\n")[:-1]
        lines = [line.split() for line in log]
        # Some steps were taken twice, with one result.
        assert {(int(n), loss) for n, loss in lines} == set(uninterrupted.items())


def trained(folder, steps, fatal):
    """Two fresh processes that save every other step."""
    arguments = (steps, str(folder), 2, fatal)
    return spawn(runs.resumable, args=arguments, nprocs=2, settings=None, grace=3)


LAUNCH = [sys.executable, "-m", "jdist.launch", "--nproc", "2", "--grace"]


def failing(mode, rank, grace=60):
    """What `launch` says when that happens to one of two processes."""
    program = ["-m", "tests.data_parallel.failing_run", mode, str(rank)]
    done = subprocess.run(
        [*LAUNCH, str(grace), *program],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_an_error_ends_the_run_and_everybody_knows_whose():
    """Not after the five minutes that JAX would wait at its exit."""
    status, said = failing("raise", 1)
    assert status == 1
    assert "worker1 (pid" in said
    assert "ended with exit code 1; the others were ended." in said
    assert "[worker1] ValueError: planted" in said
    assert "ProcessLost: Rank 1 of 2 left the run at" in said
    assert ": ValueError: planted" in said


def test_an_error_on_rank_0_takes_jaxs_coordinator_with_it():
    """Then JAX itself ends the others; `launch` says who was first."""
    status, said = failing("raise", 0)
    assert status == 1
    assert "worker0 (pid" in said
    assert "ended with exit code 1; the others were ended." in said
    assert said.rstrip().endswith("ValueError: planted")


def test_a_killed_process_is_named_by_launch_and_by_the_others():
    status, said = failing("kill", 1)
    assert status == 128 + signal.SIGKILL
    assert "was killed by SIGKILL; the others were ended." in said
    expected = "ProcessLost: Rank 1 of 2 was lost: a collective failed at"
    assert expected in said


def test_a_frozen_process_is_lost_after_its_heartbeat():
    """Its connections are still open, so that no collective fails."""
    status, said = failing("freeze", 1, grace=1)
    assert status == 128 + signal.SIGABRT
    assert "worker0 (pid" in said
    assert "was killed by SIGABRT; the others were ended." in said
    assert "The following tasks are unhealthy (stopped sending heartbeats)" in said


def test_who_comes_to_the_end_too_early_is_named_by_all():
    """By JAX those would be that still work, and all processes would be aborted."""
    _, said = failing("return", 1)
    expected = "ProcessLost: Rank 1 of 2 came to the end of the run before"
    for worker in range(2):
        (line,) = [x for x in said.splitlines() if f"[worker{worker}] jdist" in x]
        assert expected in line
        assert ", and rank 0 did not: lost, or with more steps to take. All" in line
    assert "SIGABRT" not in said


# --- in this process ---


class Coordinator:
    """JAX's client in a process of four, two of which come to the end."""

    def __init__(self, ended=(), left=None, gone=False):
        self.values = {f"jdist/ended/{rank}": "null" for rank in ended}
        self.values |= {
            f"jdist/left/{rank}": json.dumps(
                {"moment": 5.0, "text": "an error", **note}
            )
            for rank, note in (left or {}).items()
        }
        self.gone = gone

    def key_value_set(self, key, value):
        if self.gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]


@pytest.fixture
def rank_3_of_4(monkeypatch):
    """Gives `found(client, error)`, of which None is the end of the block."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    monkeypatch.setattr(process_group_module, "_PATIENCE", 0.0)

    def found(client, error=None):
        for module in (process_group_module, _agreement):
            monkeypatch.setattr(module, "distributed_client", lambda: client)
        if error is None:
            return process_group_module._early_end(0.1)
        return process_group_module._verdict(error)

    return found


def test_the_names_of_who_is_lost(rank_3_of_4):
    """Of those that end early, at the end and in the others' collectives; of others."""
    broken = ValueError("UNKNOWN: Gloo all-reduce failed: closed by peer")
    early = {"own": True, "text": ""}
    at_the_end = rank_3_of_4(Coordinator(ended=(1,)))
    assert rank_3_of_4(Coordinator(ended=(0, 1, 2))) is None, "the last came just then"
    in_a_collective = rank_3_of_4(Coordinator(left={1: early, 2: early}), broken)
    for lost, who, others in (
        (at_the_end, (1, 3), "0, 2"),
        (in_a_collective, (1, 2), "0, 3"),
    ):
        assert lost.ranks == who
        said = str(lost)
        assert said.startswith(f"Ranks {who[0]}, {who[1]} of 4 came to the end of the")
        assert f", and ranks {others} did not: lost, or with" in said
    silent = rank_3_of_4(Coordinator(left={0: {"own": False}}), broken)
    assert silent.ranks == (1, 2)
    assert str(silent).startswith("Ranks 1, 2 of 4 were lost: a collective failed at")
    client = Coordinator(left={1: {"own": False}, 2: {"own": False}})
    alone = rank_3_of_4(client, broken)
    assert str(alone).startswith("Rank 0 of 4 was lost")
    failed = Coordinator(left={2: {"own": True, "moment": 4.0}, 1: early})
    assert rank_3_of_4(failed, broken).ranks == (2,), "an error before an early end"
    assert rank_3_of_4(Coordinator(gone=True)).ranks == (0,)


def test_a_process_of_its_own_is_a_group_of_one(monkeypatch):
    """The mesh is over its own devices, and nothing is started."""
    for variables in ({}, launched(0, 1)):
        told(monkeypatch, variables)
        with process_group(axis="rows") as mesh:
            assert mesh.shape == {"rows": jax.device_count()}
            assert not jax.distributed.is_initialized()


def launched(rank, size, **others):
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
    return {"RANK": str(rank), "WORLD_SIZE": str(size)} | address | others


def told(monkeypatch, variables):
    for name in (*VARIABLES, "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "RANK": "0"},
            "`RANK, JAX_COORDINATOR_ADDRESS` must be set together with WORLD_SIZE",
        ),
        (launched(2, 2), r"`RANK` must be in 0\.\.1. Got 2"),
        (launched("one", 2), "`RANK` must be a number. Got one"),
        (
            {"SLURM_NTASKS": "4"},
            'SLURM_NTASKS is 4. Got None. Give `cluster="slurm"`. Or unset',
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "WORLD_SIZE is 2. Got None. Set JAX_COORDINATOR_ADDRESS to host:port",
        ),
    ],
)
def test_a_contradictory_environment_is_refused(monkeypatch, variables, expected):
    """Before anything is started."""
    told(monkeypatch, variables)
    with pytest.raises(ValueError, match=expected), process_group():
        pass


@pytest.mark.parametrize("name", ["timeout", "heartbeat"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_times_must_be_positive(name, seconds):
    expected = rf"`process_group\({name}=...\)` must be a positive number of seconds"
    with pytest.raises(ValueError, match=expected), process_group(**{name: seconds}):
        pass


def slurm(rank, job):
    """What srun tells a task, as far as JAX reads it."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def ompi(rank, job):
    """What mpirun tells a process, as far as JAX reads it."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job << 12}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }


IN_A_CLUSTER = """
import sys
import jax
from jdist import data_parallel

with data_parallel.process_group(cluster=sys.argv[1]) as mesh:
    print(jax.process_index(), jax.process_count(), mesh.size)
"""


@pytest.mark.parametrize("cluster", [slurm, ompi])
def test_processes_of_a_cluster_find_each_other(cluster):
    """By the variables of its launcher, set by hand; the job gives the port."""
    job = os.getpid()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", IN_A_CLUSTER, cluster.__name__],
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", **cluster(rank, job)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert told == ["0 2 4\n", "1 2 4\n"]


def test_a_cluster_that_jax_does_not_find_is_refused():
    """In a process of its own: the backend must not have been started."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data_parallel.failing_run", "cluster", "0"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    expected = "`process_group(cluster=...)` must be a kind of cluster that JAX finds"
    assert expected in done.stderr
