"""Any number of calls that block inside jitted programs come to their end."""

import _thread
import functools
import os
import queue
import sys
import threading
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist._compat import thread_pool_size
from jdist.autograd.call_primitive.callback import (
    CallbackThreads,
    callback_threads,
)
from jdist.autograd.call_primitive.caller import RemoteFunctions
from tests.autograd import remote_functions as functions
from tests.rpc.rref.common import PATIENCE, wait_for

ELEMENTS = 1 << 21  # 16 MiB of float64.


def occupant(callback_threads, outcomes, release):
    """What a callback does on a thread that Python did not start."""
    try:
        with callback_threads.occupied("remote_call('b', f)"):
            outcomes.put("waits")
            assert release.wait(PATIENCE)
        outcomes.put("done")
    except rpc.RpcError as error:
        outcomes.put(str(error))


def test_the_last_thread_is_never_given_to_a_waiting_call():
    own, outcomes, release = CallbackThreads(size=3), queue.Queue(), threading.Event()
    before = threading.enumerate()

    def another():
        # A thread that `threading` does not know, as XLA's are.
        _thread.start_new_thread(occupant, (own, outcomes, release))
        return outcomes.get(timeout=PATIENCE)

    assert [another(), another()] == ["waits", "waits"]
    refusal = another()
    assert "remote_call('b', f)` inside a jitted function must leave one" in refusal
    assert "Got 2 calls that wait on its 3 threads already" in refusal
    assert "PJRT_NPROC" in refusal
    with own.occupied("of Python's own thread"):  # Which is none of XLA's.
        assert own.waiting == 2
    release.set()
    assert [outcomes.get(timeout=PATIENCE) for _ in range(2)] == ["done", "done"]
    assert own.waiting == 0
    assert another() == "waits"
    assert outcomes.get(timeout=PATIENCE) == "done"
    assert threading.enumerate() == before  # Nobody was entered there for good.


def test_with_a_single_thread_no_call_waits_on_it():
    outcomes = queue.Queue()
    _thread.start_new_thread(
        occupant, (CallbackThreads(1), outcomes, threading.Event())
    )
    assert "Got 0 calls that wait on its 1 threads" in outcomes.get(timeout=PATIENCE)


def test_the_size_is_that_of_the_environment_but_at_least_the_devices(monkeypatch):
    devices = len(jax.devices("cpu"))
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.setenv(name, str(devices + 5))
        assert thread_pool_size() == devices + 5
        monkeypatch.setenv(name, "1")
        assert thread_pool_size() == devices
        monkeypatch.delenv(name)
    assert thread_pool_size() >= devices


# --- more at once than the pool holds ---


@jax.jit
def in_a_loop(x):
    """XLA runs the body of such a loop on its own threads, where it has any free."""

    def step(carry, _):
        y = autograd.remote_call("worker1", functions.shift, carry @ carry, 1e-3)
        return y, None

    return jax.lax.scan(step, x, None, length=2)[0]


def more_than_the_pool_holds():
    x = functions.rows(1, shape=(600, 600))
    compiled = in_a_loop.lower(x).compile()
    expected = compiled(x)
    count, worker = callback_threads().size + 6, rpc.get_worker_info().name
    at_the_gate, gate, outcomes = queue.Queue(), threading.Event(), queue.Queue()
    make = RemoteFunctions.make

    def late(self, *args, **kwargs):
        at_the_gate.put(None)
        assert gate.wait(PATIENCE)
        return make(self, *args, **kwargs)

    def use():
        with rpc.use_worker(worker):
            try:
                outcomes.put(np.asarray(compiled(x)))
            except jax.errors.JaxRuntimeError as error:
                outcomes.put(error)

    threads = [threading.Thread(target=use) for _ in range(count)]
    with mock.patch.object(RemoteFunctions, "make", late):
        for thread in threads:
            thread.start()
        # Each of them waits, or is refused: nobody is held up behind the waiting ones.
        seen = wait_for(lambda: at_the_gate.qsize() + outcomes.qsize() == count)
        waiting = callback_threads().waiting
        gate.set()
        found = [outcomes.get(timeout=PATIENCE) for _ in range(count)]
        for thread in threads:
            thread.join(PATIENCE)
    assert seen
    assert waiting < callback_threads().size
    refused = [each for each in found if isinstance(each, Exception)]
    served = [each for each in found if not isinstance(each, Exception)]
    for error in refused:
        assert "must leave one of XLA's threads free" in str(error)
    assert len(served) >= waiting
    for each in served:
        assert np.array_equal(each, expected)
    assert callback_threads().waiting == 0
    assert np.array_equal(compiled(x), expected)  # Afterwards all is well.


def test_more_calls_than_the_pool_holds_end(cluster):
    cluster.run(0, more_than_the_pool_holds)


# --- pinned to one core, with large arguments ---


def around(here, there, x):
    """Twice in a loop to the other worker, and from there back and back again."""

    def step(carry, by):
        y = autograd.remote_call(there, functions.relayed_twice, carry, by, here)
        return y * 0.5, None

    y, _ = jax.lax.scan(step, x, jnp.array([1.0, 2.0]))
    return (y**2).sum()


def around_without_going(x):
    for by in (1.0, 2.0):
        x = jnp.sin(jnp.sin(x) * by) * 0.5
    return (x**2).sum()


def xla_threads():
    """How many XLA has really made; Linux names them."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("tf_XLAEigen\n")


def one_of_two(rank):
    """Both call each other in loops, several at once, with 16 MiB."""
    rpc.init_rpc(f"worker{rank}", allow=["tests"])
    here, there = f"worker{rank}", f"worker{1 - rank}"
    x = jnp.linspace(-1.0, 1.0, ELEMENTS)
    outcomes = queue.Queue()
    gradient = jax.jit(jax.grad(functools.partial(around, here, there)))

    compiled = gradient.lower(x).compile()
    expected = jax.grad(around_without_going)(x)
    rpc.barrier()

    def call():
        try:
            outcomes.put(bool(jnp.allclose(compiled(x), expected)))
        except jax.errors.JaxRuntimeError as error:
            outcomes.put("must leave one of XLA's threads free" in str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rpc.barrier(timeout=0)
    rpc.shutdown()
    return (
        len(os.sched_getaffinity(0)),
        callback_threads().size,
        xla_threads(),
        [*outcomes.queue],
    )


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2,
    reason="pins two processes to a core each",
)
@pytest.mark.parametrize("callback_threads", [8, 0])
def test_pinned_to_one_core_with_16_mib(monkeypatch, callback_threads):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    settings = rpc.ProcessSettings(callback_threads=callback_threads)
    found = rpc.spawn(one_of_two, nprocs=2, pin=1, settings=settings, timeout=240)
    for cores, size, made, outcomes in found:
        assert (cores, size) == (1, callback_threads or 1)
        assert made == size
        assert outcomes == [True] * 2
