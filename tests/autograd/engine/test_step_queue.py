"""The step queue: steps run one at a time, on any thread, and none is lost."""

import functools
import threading

import jax.numpy as jnp
import pytest

from jdist import autograd, rpc
from jdist.autograd.contexts import here
from jdist.autograd.engine import engine as engines
from jdist.autograd.engine.engine import Root, StepQueue
from jdist.rpc.base import current
from jdist.rpc.base.current import NEVER, Scope
from tests.rpc.hosts import PATIENCE


def test_steps_that_many_threads_bring_run_one_at_a_time():
    steps, ran, inside = StepQueue(None), [], []

    def step(number):
        inside.append(number)
        assert inside == [number]
        ran.append(number)
        inside.clear()

    def bring(start):
        for number in range(start, start + 2000):
            steps.put(functools.partial(step, number))

    threads = [threading.Thread(target=bring, args=(k * 2000,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(ran) == list(range(12_000))
    assert not steps.waiting


def test_a_thread_that_finds_it_busy_leaves_the_step_there():
    steps, entered, ran = StepQueue(None), threading.Event(), []
    go_on = threading.Event()

    def slow():
        entered.set()
        assert go_on.wait(PATIENCE)
        ran.append("slow")

    thread = threading.Thread(target=steps.put, args=(slow,))
    thread.start()
    assert entered.wait(PATIENCE)
    steps.put(lambda: ran.append("next"))
    assert steps.waiting
    assert not ran
    go_on.set()
    thread.join(PATIENCE)
    assert ran == ["slow", "next"]


def interrupt():
    raise KeyboardInterrupt("Ctrl-C")


def test_an_interrupt_leaves_the_rest_to_the_next_one():
    steps, ran = StepQueue(None), []

    def first():
        steps.put(lambda: ran.append("left"))
        interrupt()

    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        steps.put(first)
    assert ran == []
    steps.put(lambda: ran.append("next"))
    assert ran == ["left", "next"]


def test_steps_run_as_the_worker_of_the_queue():
    with rpc.local_cluster(["a", "b"]):
        with rpc.use_worker("b"):
            steps = StepQueue(Scope(current.worker()))
        names = []
        steps.put(lambda: names.append(rpc.get_worker_info().name))
        assert [*names, rpc.get_worker_info().name] == ["b", "a"]


def test_a_step_that_waits_runs_what_is_ready():
    """The step before it leaves the nodes to it."""
    with rpc.local_cluster(["only"]), autograd.context() as context_id:
        x = autograd.variable(jnp.array([2.0, 3.0], jnp.float32))
        root = Root((x * x).sum().edge, jnp.float32(1.0))
        context = here().retrieve(context_id)
        started = engines.of(here()).begin(context, [root], {}, False, NEVER)
        done = []

        def begin_and_leave():
            started._begin()
            started._put(lambda: done.append(started.outcome.done()))

        started._put(begin_and_leave)
        assert done == [False]
        assert started.outcome.done()
        assert started.outcome.value() is None
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 6.0]
