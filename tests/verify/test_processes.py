"""Processes that judge together: their own shards each, one verdict for all."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import verify
from jdist.verify.processes.shards import held
from tests.data_parallel import group_runs
from tests.rpc.hosts import Hosts
from tests.verify import process_runs as runs


@pytest.fixture(scope="module")
def trio(fork_server):
    """Three processes of one run, which end as they stand."""
    hosts = Hosts(fork_server, 3)
    try:
        hosts.everywhere(group_runs.join)
        yield hosts
    finally:
        hosts.close()


def same(found):
    """What every process has given alike."""
    assert all(each == found[0] for each in found[1:]), found
    return found[0]


def test_every_process_gets_the_same_report(pair):
    """A wrong shard and a differing replica, on one process, are told by both."""
    text, ok, verdicts, problems = same(
        pair.everywhere(runs.judged, list(runs.CANDIDATES), True)
    )
    assert not ok
    assert {verdicts["right", path] for path in ("w", "b", "(loss)")} <= {
        "equal", "bit-equal",
    }  # fmt: skip
    assert set(problems) == {("shard", "w"), ("replicas", "b"), ("everywhere", "w")}
    wrong = problems["shard", "w"]
    assert wrong.startswith("on process 1: in [4:6, :], off by ")
    assert "at [4, 1]" in wrong
    assert problems["replicas", "b"] == (
        "replicas differ over data at [:]: data=0, data=1 other than data=2, data=3"
    )
    assert "on process" not in problems["everywhere", "w"]
    assert "it is 2 times the reference" in problems["everywhere", "w"]
    assert "shard: w: on process 1" in text


def test_trees_are_compared_where_they_lie(pair):
    """An ulp passes in its shard, a negated replica fails; a reference is whole."""
    text, refusal = same(pair.everywhere(runs.compared))
    assert "candidate: b: replicas differ over data at [:]" in text
    assert "on process 1: in [:], off by" in text
    assert "candidate: w" not in text
    assert "`compare(reference=...)` must be whole on every process" in refusal


def test_no_host_gets_what_it_does_not_hold(pair):
    """Of a matrix over two processes half is looked at by each."""
    for ok, sizes, whole in pair.everywhere(runs.gathered):
        assert ok
        assert sizes == [whole // 4] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_process_raises_ends_all(pair, rank):
    """By name, at once; and afterwards they are in step again."""
    found = pair.everywhere(runs.raising, rank)
    assert [again for _, again in found] == [True, True]
    (kind, text), (others_kind, others_text) = found[rank][0], found[1 - rank][0]
    assert (kind, text) == ("ArithmeticError", "no numbers here")
    assert others_kind == "PeersLost"
    assert others_text == f"process {rank} raised ArithmeticError: no numbers here"


def test_whole_steps_are_judged_where_they_lie(pair):
    """By one reference on every process, and a wrong shard is told by all."""
    text, right, causes = same(pair.everywhere(runs.stepped))
    assert right, text
    assert causes == [("shard", 1, "gradient or optimizer update")]
    rule = "shard: params/w: after step 1 of 2: on process 1: in [4:6, :], its step: "
    assert rule in " ".join(text.split())


TRACED = {
    "right": None,
    "examples": None,
    "part": ("forward", "hidden", "on tp=1 of 2 parts: ", "1.1 times the reference"),
    "copy": ("forward", "out", "on tp=1 of 2 parts: ", "1.1 times the reference"),
    "cotangent": ("backward", "hidden", "on tp=1 of 2 parts: ", "2 times"),
    "sum": ("gradient", "in", "it is 3 times the reference", ""),
}


@pytest.mark.parametrize("name", TRACED)
def test_each_process_traces_its_shards(pair, name):
    """One finding on all of them, of parts and copies that others have too."""
    right, difference, passed, notes = same(pair.everywhere(runs.traced, name))
    assert notes == ()
    if TRACED[name] is None:
        taps = ("hidden", "out")
        assert right
        assert difference is None
        assert passed == tuple(
            [f"forward {x}" for x in taps] + [f"backward {x}" for x in taps[::-1]]
        )
        return
    direction, tap, *words = TRACED[name]
    assert not right
    assert difference[:2] == (direction, tap)
    assert all(each in difference[2] for each in words)


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("wrong", 1)])
def test_the_command_exits_alike(pair, name, status):
    """With the same lines on every process."""
    found, text = same(pair.everywhere(runs.command, name))
    assert found == status
    assert ("mine: w: on process 1: in [4:6, :]" in text) == bool(status)


def test_three_processes_do_not_wait_for_ever(trio):
    """For one that has raised, and for one that has not come."""
    text, ok, _, problems = same(trio.everywhere(runs.judged, ["right", "shard"]))
    assert not ok
    assert "shard: w: on process 1: in [4:6, :]" in text
    assert set(problems) == {("shard", "w")}
    missed = trio.everywhere(runs.absent, 1, 2.0)
    assert missed[1] is None
    for rank in (0, 2):
        # On a busy machine the other may be late as well.
        rule = rf"process {rank} of 3: nothing came from process .*1.* within 2 s\. "
        assert re.match(rule, missed[rank])
    # It comes when the others have gone, and does not wait for ever either.
    late = trio.run(1, runs.absent, 0, 2.0)
    assert re.match("process 1 of 3: nothing came from process 0, 2 within", late)
    # What this call begins cannot end: these processes do nothing afterwards.
    found = trio.everywhere(runs.raising_before_a_collective, 1, 60.0)
    assert found[1] == ("ArithmeticError", "no numbers here")
    assert found[0] == found[2] == (
        "PeersLost", "process 1 raised ArithmeticError: no numbers here",
    )  # fmt: skip


@pytest.fixture
def divided():
    """A function that lays rows over four devices, twice."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("rows", "copies"))

    def make(values, changed=None, change=lambda x: x):
        sharding = NamedSharding(mesh, P("rows"))
        pieces = [
            jax.device_put(change(values[i]) if d.id == changed else values[i], d)
            for d, i in sharding.addressable_devices_indices_map(values.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(values.shape, sharding, pieces)

    return make


def test_replicas_in_one_process_are_compared_too(divided, rng):
    """NumPy would see the first of them only; one bit is enough."""
    values = rng.normal(size=(8, 3)).astype(np.float32)
    assert verify.compare({"w": values}, {"w": divided(values)}).bit_equal
    second = divided(values, 5, lambda x: np.nextafter(x, np.float32(9)))
    np.testing.assert_array_equal(np.asarray(second), values)
    report = verify.compare({"w": values}, {"w": second})
    (row,) = report.failures
    assert row.path == "w"
    assert row.problem == (
        "replicas differ over copies at [4:6, :]: copies=0 other than copies=1"
    )


def test_what_is_held_of_an_array(divided, rng):
    """The whole of what is here; a digest of what several devices hold."""
    values = rng.normal(size=(8, 3)).astype(np.float32)
    found = held(divided(values))
    assert (found.dtype, found.shape) == ("float32", (8, 3))
    (shard,) = found.shards
    np.testing.assert_array_equal(shard.values, values)
    assert list(found.replicas) == ["[0:2, :]", "[2:4, :]", "[4:6, :]", "[6:8, :]"]
    assert held(values).replicas == {}
    keys = jax.random.split(jax.random.key(3), 4)
    assert held(keys).shape == (4, 2)
