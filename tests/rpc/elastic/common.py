"""Elastic groups for tests: the same bodies within a process and between processes."""

import signal

from jdist import rpc
from tests.rpc.hosts import Task, in_threads, results


class Threads:
    """An elastic group in this process.

    Attributes:
      kind: "in-process" or "process".
    """

    kind = "in-process"

    def __init__(self, join):
        self._join = join
        self.names = [rpc.get_worker_info().name]

    def begin_to_join(self, name, rank=None):
        """Begins to join, as a Task; `rank` by default the lowest that is free."""
        assert rank is None
        return in_threads([self.names[0]])(0, self._join, name)

    def stranger(self, name, rank):
        """Somebody who shall not be let in."""
        return self.begin_to_join(name)

    def start(self, name, body, *args, **kwargs):
        """Begins a body on that worker, as a Task."""
        return in_threads([name])(0, body, *args, **kwargs)

    def forget(self, name):
        """It has left."""


class Processes:
    """An elastic group of host processes, each of which may be a worker."""

    kind = "process"

    def __init__(self, hosts, port, **options):
        self.hosts = hosts
        self._port = port
        self._options = options
        self._places = {}
        self._ranks = {}
        self.names = []

    def begin_to_join(self, name, rank=None):
        place = min(self.hosts.alive - set(self._places.values()))
        ranks = {self._ranks[other] for other in self._places}
        if rank is None:
            rank = min(set(range(len(ranks) + 1)) - ranks)
        self._places[name], self._ranks[name] = place, rank
        return self.hosts.start(place, join, name, rank, self._port, **self._options)

    def stranger(self, name, rank):
        place = max(self.hosts.alive - set(self._places.values()))
        return self.hosts.start(place, join, name, rank, self._port, **self._options)

    def start(self, name, body, *args, **kwargs):
        return self.hosts.start(self._places[name], body, *args, **kwargs)

    def forget(self, name):
        del self._places[name]

    def signal(self, name, number):
        """Sends a signal to a worker; after SIGKILL it is none any more."""
        self.hosts.signal(self._places[name], number)
        if number == signal.SIGKILL:
            self.names.remove(name)
            self.forget(name)

    def pid(self, name):
        return self.hosts.pids[self._places[name]]


class Elastic:
    """Either of them, with what follows from `start`."""

    def __init__(self, group):
        self._group = group
        self.kind = group.kind
        self.start = group.start
        self.begin_to_join = group.begin_to_join
        self.stranger = group.stranger

    def __getattr__(self, name):
        return getattr(self._group, name)

    def join(self, name, rank=None):
        """A new worker of this name; returns when it belongs to the group."""
        info = self.begin_to_join(name, rank).result()
        self.joined(name)
        return info

    def joined(self, name):
        """It belongs to the group now."""
        self._group.names.append(name)

    def run(self, name, body, *args, **kwargs):
        return self.start(name, body, *args, **kwargs).result()

    def everywhere(self, body, *args, **kwargs):
        """Runs a body on all workers at once; results by name, in order of joining."""
        tasks = [self.start(name, body, *args, **kwargs) for name in self.names]
        return dict(zip(self.names, results(tasks), strict=True))

    def begin_to_leave(self, name, body=rpc.shutdown, **options):
        """Begins to shut a worker down, as a Task."""
        self._group.names.remove(name)
        task = self.start(name, body, **options)
        return Task(
            f"shutdown of {name}", lambda timeout: self._left(name, task, timeout)
        )

    def leave(self, name, **options):
        """A worker leaves."""
        self.begin_to_leave(name, **options).result()

    def end(self):
        """All leave, rank 0 at the end, whatever it began first."""
        tasks = [self.begin_to_leave(name) for name in list(self.names)]
        results(tasks)

    def _left(self, name, task, timeout):
        if not task.done(timeout):
            return None
        self._group.forget(name)
        return task._outcome


def join(name, rank, port, size=0, **options):
    return rpc.init_rpc(
        name,
        rank=rank,
        world_size=size,
        coordinator=("127.0.0.1", port),
        allow=["tests"],
        options=rpc.RpcOptions(**options),
    )


def who():
    return rpc.get_worker_info().name


def greet(name):
    return f"{name}, I am {who()}"


def greet_all(names):
    """Calls every one, in both ways."""
    for name in names:
        assert rpc.rpc_sync(name, greet, args=("a",)) == f"a, I am {name}"
    futures = [rpc.rpc_async(name, greet, args=("b",)) for name in names]
    assert rpc.wait_all(futures) == [f"b, I am {name}" for name in names]


def infos():
    return rpc.get_worker_infos()


def lost():
    return rpc.debug_info()["group.lost"]
