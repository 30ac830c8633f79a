"""Records between processes, over a store in memory: order, failures, deadlines.

`test_processes.py` has the same over `jax.distributed`; here threads stand for the
processes of a run, so that each may be late, fail or leave at any point.
"""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import _agreement, verify
from jdist._agreement import RecordExchange
from jdist.verify import PeersLost
from jdist.verify.processes import peers
from jdist.verify.processes.peers import ADVICE, Peers, joined
from jdist.verify.tracing.recording import MeshAxis, TapRecord, of_all_processes


class Store:
    """The coordinator's keys and values, as far as the judge uses them."""

    def __init__(self):
        self.values = {}
        self.lock = threading.Lock()

    def key_value_set(self, key, value):
        with self.lock:
            assert key not in self.values, "each key is set once"
            self.values[key] = value

    def key_value_dir_get(self, prefix):
        with self.lock:
            return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]

    def key_value_delete(self, key):
        with self.lock:
            del self.values[key]


@pytest.fixture
def store(monkeypatch):
    """A store that all peers of the test use."""
    made = Store()
    for module in (peers, _agreement):
        monkeypatch.setattr(module, "distributed_client", lambda: made)
    return made


@pytest.fixture
def run(store):
    """`run(body, size)`: what `body(peers, rank)` returned or raised, by rank."""

    def start(body, size=3, timeout=60.0):
        def one(rank):
            own = Peers(timeout, RecordExchange("jdist/verify", rank, size, ADVICE))
            try:
                return body(own, rank)
            except Exception as error:  # noqa: BLE001
                own.failed(error)
                return error

        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(one, range(size)))

    return start


def test_all_get_all_records_by_rank(run):
    """Several exchanges, of what JSON holds: NaN and infinity among it."""

    def body(own, rank):
        first = own.exchange({"rank": rank, "ratio": math.inf})
        second = own.exchange([rank, math.nan, "text", None])
        return first, second

    found = run(body)
    for first, second in found:
        assert first == [{"rank": r, "ratio": math.inf} for r in range(3)]
        assert [each[0] for each in second] == [0, 1, 2]
        assert all(math.isnan(each[1]) for each in second)
        assert [each[2:] for each in second] == [["text", None]] * 3


def test_the_store_does_not_grow(run, store):
    """Each keeps its last record alone: the one before has been read by all."""
    run(lambda own, rank: [own.exchange(n) for n in range(20)])
    assert len(store.values) == 3
    assert all(json.loads(text) == {"record": 19} for text in store.values.values())


def test_one_process_alone_needs_no_store():
    """Nothing is posted, and nothing waited for."""
    own = Peers(0.0)
    assert own.exchange({"any": object}) == [{"any": object}]
    arrays = [jnp.ones(3)]
    assert own.computed(arrays) is arrays
    own.failed(ValueError("not told to others"))


@pytest.mark.parametrize("failing", range(3))
def test_what_one_raises_is_raised_by_the_others(run, failing):
    """With its rank, its type and its words; its own error stays what it is."""

    def body(own, rank):
        own.exchange("before")
        if rank == failing:
            raise ArithmeticError("no numbers here")
        return own.exchange("after")

    found = run(body)
    for other, error in enumerate(found):
        if other == failing:
            assert isinstance(error, ArithmeticError)
        else:
            assert isinstance(error, PeersLost)
            words = f"process {failing} raised ArithmeticError: no numbers here"
            assert str(error) == words


def test_a_lost_process_is_not_told_of_twice(run, store):
    """`PeersLost` is posted by none of those that raise it."""

    def body(own, rank):
        if rank == 1:
            raise ArithmeticError("no numbers here")
        return own.exchange("after")

    found = run(body)
    assert [type(e) for e in found] == [PeersLost, ArithmeticError, PeersLost]
    told = [t for t in store.values.values() if "refusal" in json.loads(t)]
    assert len(told) == 1


def test_a_late_process_is_named(run):
    """By those that waited for it, with what they must do."""

    def body(own, rank):
        return None if rank == 2 else own.exchange("here")

    *found, absent = run(body, timeout=0.2)
    assert absent is None
    for rank, error in enumerate(found):
        assert isinstance(error, PeersLost)
        words = str(error)
        assert words.startswith(f"process {rank} of 3: nothing came from process 2 ")
        assert "within 0.2 s. Every process must call the judge" in words


def test_arrays_under_computation_are_waited_for(run, store, monkeypatch):
    """Until they are there, or another process raises, or the time is over."""
    monkeypatch.setattr(peers, "is_computed", lambda array: False)
    arrays = [jnp.ones(2)]

    def raising(own, rank):
        if rank == 1:
            raise ArithmeticError("no numbers here")
        return own.computed(arrays)

    error, _ = run(raising, size=2)
    assert str(error) == "process 1 raised ArithmeticError: no numbers here"
    store.values.clear()
    error, other = run(lambda own, rank: own.computed(arrays), size=2, timeout=0.1)
    for rank, each in enumerate((error, other)):
        assert isinstance(each, PeersLost)
        words = str(each)
        assert words.startswith(f"process {rank} of 2: what the candidate returned")
        assert "within 0.1 s. Every process must call it" in words
    looked = iter([False, False, True, True])
    monkeypatch.setattr(peers, "is_computed", lambda array: next(looked))
    (found,) = run(lambda own, rank: own.computed(arrays), size=1)
    assert found is arrays


def test_a_judgement_tells_of_its_error(store, monkeypatch):
    """`joined` posts what is raised inside it, and raises it."""
    monkeypatch.setattr(peers.jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers.jax, "process_index", lambda: 1)
    with pytest.raises(KeyboardInterrupt, match="by hand"), joined(1.0):
        raise KeyboardInterrupt("by hand")
    (text,) = store.values.values()
    assert json.loads(text) == {"refusal": "KeyboardInterrupt: by hand"}


def test_a_step_tells_of_candidates_that_are_none(store, monkeypatch):
    """Before the reference: the other processes must not wait for this one."""
    monkeypatch.setattr(peers.jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers.jax, "process_index", lambda: 1)
    state, batches = (jnp.float32(0.7), ()), [jnp.arange(5.0)]
    with pytest.raises(ValueError, match="must name at least one function"):
        verify.step(lambda p, b: p * b, lambda g, s: (g, s), state, batches, {})
    (text,) = store.values.values()
    assert "must name at least one function" in json.loads(text)["refusal"]


def test_taps_of_all_processes_come_by_name_then_by_rank(run):
    """In the order of each program, as they were recorded, in any dtype."""
    mesh = (MeshAxis("dp", 3, 0, True),)

    def body(own, rank):
        narrow = np.asarray(jnp.full((2, 1), rank + 0.5, jnp.bfloat16))
        turned = np.array([[1.0, 2.0], [np.nan, 1j]]).T
        return of_all_processes(
            [
                TapRecord("last", 1, narrow, -narrow, mesh, (rank,), 8),
                TapRecord("last", 0, np.array(rank), None, number=3),
                TapRecord(f"of {rank}", 0, turned, None),
            ],
            own,
        )

    first, *others = run(body)
    assert [x.name for x in first] == ["last"] * 6 + ["of 0", "of 1", "of 2"]
    assert [x.number for x in first] == [*range(6), 0, 0, 0]
    assert [int(x.value) for x in first[:6:2]] == [0, 1, 2]
    for rank, each in enumerate(first[1:6:2]):
        assert (each.axes, each.mesh, each.place) == (1, mesh, (rank,))
        assert each.value.dtype == jnp.bfloat16
        assert (each.cotangent == -each.value).all()
    np.testing.assert_array_equal(first[-1].value, [[1.0, np.nan], [2.0, 1j]])
    for other in others:
        assert str(other) == str(first)
