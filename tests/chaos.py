"""Random delays at every hand-off: between threads, through frames, calls and timers.

A machine under load delays threads now and then, and what assumes an order that nothing
ensures fails then. With `make chaos SEED=7` it happens all the time: before a thread or
a task of a pool begins, before a timer rings, before a frame is sent and after one has
come, before a call and after a wait. The plan follows from the seed alone: the n-th
passage of a hand-off waits as long in every run. Which passage is whose is the
scheduler's, so that a failure need not show again in the first try.

Each seed runs its own part of the tests that distribute, and prints itself.
"""

import concurrent.futures.thread
import functools
import itertools
import os
import random
import re
import threading
import time
from collections import defaultdict

VARIABLE = "JDIST_CHAOS"
"""The environment variable with the seed, for child processes as well."""

SUBJECTS = (
    "tests/rpc/base", "tests/rpc/calls", "tests/rpc/conformance", "tests/rpc/elastic",
    "tests/rpc/group", "tests/rpc/modules", "tests/rpc/rref", "tests/rpc/wire",
    "tests/rpc/test_interrupts.py",
    "tests/autograd",
    "tests/data_parallel/elasticity",
    "tests/pipeline/test_workers.py", "tests/pipeline/test_worker_meshes.py",
    "tests/pipeline/run/test_worker_channels.py",
)  # fmt: skip
"""What a seed chooses from."""

# The share of passages, and the least and the largest number of seconds that they wait.
_DELAYS = ((0.01, 0.02, 0.1), (0.05, 0.002, 0.02), (0.3, 0.0, 0.002))
_MOST = 500  # passages of a hand-off that wait: some send a thousand frames


class Plan:
    """The delays of one seed.

    Attributes:
      seed: The seed.
      passages: How many hand-offs this process has delayed.
    """

    def __init__(self, seed):
        self.seed = seed
        self.passages = 0
        self._counts = defaultdict(itertools.count)

    def delay(self, place, number):
        """Seconds that this passage of the hand-off `place` waits."""
        # A text as a seed is hashed alike in every process.
        draw = random.Random(f"{self.seed} {place} {number}")
        which = draw.random() + _MOST * (number >= _MOST)
        for share, least, most in _DELAYS:
            if which < share:
                return draw.uniform(least, most)
            which -= share
        return 0.0

    def pause(self, place):
        """Waits as the plan says for the next passage of `place`."""
        seconds = self.delay(place, next(self._counts[place]))
        if seconds:
            self.passages += 1
            time.sleep(seconds)

    def chooses(self, name, share):
        """Whether the test of this name is among the share that the seed runs."""
        return random.Random(f"{self.seed} {name}").random() < share


def install(seed):
    """Delays the hand-offs of this process by the plan of a seed, which it returns."""
    from jdist.rpc.base.future import Future
    from jdist.rpc.base.thread_pool import ThreadPool
    from jdist.rpc.base.timer import Timer
    from jdist.rpc.wire import socket_transport
    from jdist.rpc.wire.connection import Connection
    from jdist.rpc.wire.in_process import _End

    plan = Plan(seed)

    def late(owner, name, place, after=False):
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def delayed(*args, **options):
            if not after:
                plan.pause(place(*args))
            result = plain(*args, **options)
            if after:
                plan.pause(place(*args))
            return result

        setattr(owner, name, delayed)

    late(threading.Thread, "run", lambda thread: f"thread {_named(thread.name)}")
    late(threading.Condition, "wait", lambda *_: _here("condition"), after=True)
    late(concurrent.futures.thread._WorkItem, "run", lambda *_: _here("work"))
    late(ThreadPool, "_attempt", lambda pool, _: f"task {_named(pool._name)}")
    late(Timer, "_call", lambda timer, _: f"timer {_named(timer._thread.name)}")
    late(Future, "wait", lambda *_: _here("future"), after=True)
    late(socket_transport, "dial", lambda *_: _here("dial"))
    for channel in (Connection, _End):
        late(channel, "send", lambda to, frame, *_: f"{frame.kind} {_named(to.peer)}")
        late(channel, "receive", lambda of, *_: f"from {_named(of.peer)}", after=True)
        late(channel, "exchange", lambda to, *_: f"exchange {_named(to.peer)}")
    return plan


def _here(kind):
    # Not by `current_thread`, which would enter a thread that XLA started for good.
    thread = threading._active.get(threading.get_ident())
    return f"{kind} {_named('' if thread is None else thread.name)}"


def _named(name):
    """Without what differs from run to run: numbers of threads, and of transports."""
    return re.sub(r":[0-9a-f]{16}$|^Thread-.*", "", name)


def keep(items, plan, share):
    """The tests that a seed runs, in their order, and the others."""
    kept, left = [], []
    for item in items:
        chosen = item.nodeid.startswith(SUBJECTS) and plan.chooses(item.nodeid, share)
        (kept if chosen else left).append(item)
    return kept, left


PLAN = install(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
SHARE = float(os.environ.get("JDIST_CHAOS_SHARE", "0.1"))
