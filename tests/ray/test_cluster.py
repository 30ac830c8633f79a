"""Workers on the machines of a cluster: placed, used, lost, replaced, ended."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist.ray
from jdist import Unavailable, autograd, rpc
from tests.ray import bodies

pytestmark = [
    pytest.mark.ray,
    # Ray's own: sockets and files that it leaves to the collector, forks beside JAX.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]
PLACES = {"resources": {"slot": 1}, "allow": ["tests.ray.bodies"]}


def assert_gone(pids):
    """None of the processes is left, within some seconds."""
    until = time.monotonic() + 20
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def pids_of(workers):
    return [rpc.rpc_sync(info, bodies.pid) for info in workers.infos]


def over_all(workers, params, steps):
    """A pipeline over all workers; its losses, and the parameters of all stages."""
    begun = [
        rpc.rpc_async(info, bodies.train_pipeline, args=(params, steps))
        for info in workers.infos
    ]
    found = rpc.wait_all(begun)
    assert all(losses == found[0][0] for losses, _ in found)
    stages = [params for _, params in found]
    # Each worker has the stage of its place, and no other.
    assert [[w is None for w in own] for own in stages] == (
        (~np.eye(4, dtype=bool)).tolist()
    )
    return found[0][0], [own[stage] for stage, own in enumerate(stages)]


def test_calls_references_gradients_and_a_pipeline_over_two_machines(machines):
    """Four workers, two on each; afterwards none of their processes is left."""
    threads = threading.active_count()
    with jdist.ray.cluster(bodies.NAMES, strategy="SPREAD", **PLACES) as workers:
        nodes = workers.nodes()
        assert list(nodes) == bodies.NAMES
        assert sorted(map([*nodes.values()].count, {*nodes.values()})) == [2, 2]
        pids = pids_of(workers)
        assert len({*pids, os.getpid()}) == 5
        told = [
            [rpc.rpc_sync(name, bodies.variable, args=(v,)) for name in bodies.NAMES]
            for v in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        ]
        assert told == [["1", "2", "3", "4"], ["5"] * 4, ["0"] * 4]

        # A chain of references: x W0 goes from worker to worker.
        x = jnp.asarray(bodies.BATCH["x"])
        weights = [jnp.asarray(w) for w in bodies.PARAMS]
        with autograd.context() as context:
            variables = [autograd.variable(w) for w in weights]
            y = x
            for name, w in zip(bodies.NAMES, variables, strict=True):
                y = rpc.remote(name, bodies.layer, args=(w, y)).to_here()
            total = autograd.apply(jnp.sum, autograd.apply(bodies.squared, y))
            autograd.backward(context, [total])
            found = autograd.get_gradients(context)
            found = [np.asarray(found[w]) for w in variables]

        losses, stages = over_all(workers, bodies.PARAMS, 3)
    assert_gone(pids)
    assert threading.active_count() <= threads + 1

    def whole(weights):
        y = x
        for w in weights:
            y = bodies.layer(w, y)
        return (y * y).sum()

    # Ten examples, four layers: a few hundred roundings of terms of size 10.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=300 * 10 * 2**-24),
        found,
        jax.grad(whole)(weights),
    )
    assert (losses, *map(np.ndarray.tolist, stages)) == alone(3)


def alone(steps):
    """The pipeline in one process, where sums have the same order: bit for bit."""
    losses, stages = bodies.train_pipeline(bodies.PARAMS, steps, None)
    return losses, *(stage.tolist() for stage in stages)


class ElasticTraining:
    """An elastic run of the driver and all workers, in the middle of which two die.

    Attributes:
      begun: Names of the workers that took part, and the futures of what they have.
    """

    def __init__(self, machines):
        self._machines = machines
        self._workers = None
        self.begun = []

    def joined(self, info):
        if self._workers is not None:
            self.begin(info)

    def begin(self, info):
        future = rpc.rpc_async(info, bodies.train_elastic, timeout=0)
        self.begun.append((info.name, future))

    def run(self, workers):
        """What each replica that lived has, and the names of those that did not."""
        self._workers = workers
        for info in workers.infos:
            self.begin(info)
        lived, lost = [bodies.train_elastic(self._before)], []
        for name, future in self.begun:
            try:
                lived.append(future.wait())
            except rpc.WorkerLost as error:
                lost.append((name, error.worker))
        return lived, lost

    def _before(self):
        """Before each share of the driver, which waits for the newcomers' first."""
        if bodies.shares() == 5:
            self._machines.replace_one()
        if bodies.shares() > 20:
            self._workers.wait(60)
            newcomers = [name for name, _ in self.begun[4:]]
            if len(newcomers) < 2 or not all(
                rpc.rpc_sync(name, bodies.shares) for name in newcomers
            ):
                time.sleep(0.02)


def test_training_goes_on_over_a_machine_that_is_lost_and_replaced(machines):
    """An elastic run stays exact to the last digit; a pipeline is resumed."""
    training = ElasticTraining(machines)
    with jdist.ray.cluster(
        bodies.NAMES, replace=True, joined=training.joined, **PLACES
    ) as workers:
        losses, stages = over_all(workers, bodies.PARAMS, 3)
        pids, before = pids_of(workers), workers.nodes()
        lived, lost = training.run(workers)
        after = workers.nodes()
        more, stages = over_all(workers, stages, 3)
        pids += pids_of(workers)

    # The two of one machine, each by its name, and both came back.
    names = sorted(name for name, _ in training.begun[4:])
    assert sorted(lost) == [(name, name) for name in names]
    assert len({before[name] for name in names}) == 1
    assert [n for n in bodies.NAMES if before[n] != after[n]] == names
    assert len(lived) == 5
    params, expected = bodies.exact_run()
    for found, of_steps in lived:
        for key, value in params.items():
            np.testing.assert_array_equal(found[key], value)
        assert of_steps == {step: expected[step] for step in of_steps}
    assert len(lived[0][1]) == len(expected)
    assert all(0 < len(of_steps) < len(expected) for _, of_steps in lived[3:])
    assert (losses + more, *map(np.ndarray.tolist, stages)) == alone(6)
    assert len({*pids}) == 6
    assert_gone(pids)


def kill(worker):
    os.kill(rpc.rpc_sync(worker, bodies.pid), signal.SIGKILL)


def call_for_ever(worker):
    while True:
        rpc.rpc_sync(worker, bodies.pid)


def lose_one(pids):
    with jdist.ray.cluster(["worker0", "worker1"], **PLACES) as workers:
        pids += pids_of(workers)
        kill("worker1")
        with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker1' during rpc_s"):
            call_for_ever("worker1")
        assert rpc.rpc_sync("worker0", bodies.pid) == pids[0]
        text = r"worker1 had not been replaced within 0.5 s. `cluster\(replace=True"
        with pytest.raises(rpc.RpcTimeout, match=text):
            workers.wait(0.5)


def test_a_loss_that_is_not_replaced_ends_the_group(machines):
    pids = []
    with pytest.raises(rpc.WorkerLost, match="'worker1' during shutdown"):
        lose_one(pids)
    assert_gone(pids)


def lose_the_only_one(pids, joined):
    with jdist.ray.cluster(
        ["worker0"], replace=True, joined=joined, **PLACES
    ) as workers:
        pids += pids_of(workers)
        kill("worker0")
        workers.wait(30)
        pids += pids_of(workers)


def test_a_replacement_is_waited_for_and_what_it_brings_about_is_told(machines):
    seen, pids = [], []

    def joined(info):
        seen.append(info)
        if len(seen) == 2:
            raise ArithmeticError("no more")

    text = "worker0 could not be replaced: no more"
    with pytest.raises(rpc.RpcError, match=text) as caught:
        lose_the_only_one(pids, joined)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert_gone(pids)


def test_the_program_of_the_guide_runs(machines, tmp_path):
    """Its functions are those of the main program, which the workers import too."""
    guide = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    program = re.search(r"```\{code-block\} python\n(.*?)```", guide, re.DOTALL)[1]
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env={**os.environ, "RAY_ADDRESS": machines.address},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 workers\n[0.29"), done.stdout


def test_no_room_is_told(machines):
    with (
        pytest.raises(Unavailable, match=r"no room for 5 workers of .*slot.* by PACK"),
        jdist.ray.cluster([f"w{i}" for i in range(5)], timeout=1.0, **PLACES),
    ):
        pytest.fail("there is room for four")
