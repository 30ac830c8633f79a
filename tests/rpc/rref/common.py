"""What tests of references share: functions to call, and counts to wait for."""

import gc
import threading
import time

from jdist import rpc

PATIENCE = 60.0  # Of what must happen. Nothing waits this long unless it fails.
_gates = {}


def add(x, y):
    return x + y


def identity(x):
    return x


def fail(text="Expected error"):
    raise ValueError(text)


def gate(name):
    """An event of this process, by name; closed until somebody sets it."""
    return _gates.setdefault(name, threading.Event())


def open_gate(name):
    gate(name).set()


def close_gate(name):
    gate(name).clear()


def after_gate(name, value):
    """Returns the value once the gate is open."""
    assert gate(name).wait(PATIENCE)
    return value


def value_of(rref):
    return rref.to_here()


def make(value):
    return rpc.RRef(value)


def references():
    """How many references this worker has, and others have here."""
    told = rpc.debug_info()
    return {
        name.removeprefix("num_"): number
        for name, number in told.items()
        if name.startswith("num_")
    }


def wait_for(condition, timeout=PATIENCE):
    """Waits until `condition()` is true; whether it is."""
    until, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > until:
            return False
        pause.wait(0.005)
    return True


def wait_for_references(**expected):
    """Waits until this worker has so many; the others it has, too."""

    def seen():
        have = references()
        return {name: have[name] for name in expected}

    if not wait_for(lambda: seen() == expected, timeout=0.3):
        gc.collect()  # An exception and its frames refer to each other.
        assert wait_for(lambda: seen() == expected), seen()


NOTHING = {
    "owner_rrefs": 0, "forks": 0, "pending_users": 0, "user_rrefs": 0,
    "forks_under_way": 0, "pending_futures": 0,
}  # fmt: skip


def settle(cluster):
    """Waits until no worker has a reference to another one's value."""
    # The holders first: before a creation has arrived, its owner knows of nothing.
    cluster.everywhere(wait_for_references, user_rrefs=0, forks_under_way=0)
    cluster.everywhere(wait_for_references, **NOTHING)


class Counter:
    """Stays where it is: it has what cannot travel."""

    def __init__(self, start=0):
        self.count = start
        self.lock = threading.Lock()

    def increment(self, by=1):
        with self.lock:
            self.count += by
            return self.count

    def after(self, name, by):
        assert gate(name).wait(PATIENCE)
        return self.increment(by)

    def fail(self):
        raise ValueError("Expected error")

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def named(cls, x):
        return cls.__name__, x

    @rpc.async_execution
    def later(self, by):
        future = rpc.Future()
        future.set_result(self.increment(by))
        return future

    def __call__(self, x):
        return x + self.count

    @property
    def size(self):
        return self.count

    def _hidden(self):
        return "hidden"
