"""What workers do while one of them dies or freezes, and what they see of it.

These bodies run on the workers. Nothing here sleeps: whoever is to be hit waits until
all the others wait for it.
"""

import gc
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.group import lifecycle
from jdist.rpc.group.coordinator_client import CoordinatorClient
from tests.rpc.hosts import be_one_of
from tests.rpc.sockets import descriptors

PATIENCE = 60.0

_callers = threading.Semaphore(0)
_over = threading.Event()
_ends: dict[str, str] = {}
_ended = threading.Condition()
_before: dict[str, set] = {}


class Seen(NamedTuple):
    """How an operation ended on one worker.

    Attributes:
      kind: Name of the exception's type, or "nothing" if there was none.
      worker: Whom it names as lost.
      operation: During what.
      text: Of the exception, or the result.
      at: When, on the clock that all processes of a machine share.
    """

    kind: str
    worker: str
    operation: str
    text: str
    at: float


def see(operation, *args):
    """Does it, whatever comes of it."""
    try:
        result = operation(*args)
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        kind, at = type(error).__name__, time.monotonic()
        worker = getattr(error, "worker", "")
        return Seen(kind, worker, getattr(error, "operation", ""), str(error), at)
    return Seen("nothing", "", "", str(result), time.monotonic())


def hang():
    """A call that nothing ends but the end of its worker."""
    agent = current.worker()
    _callers.release()
    while not (agent.closed or _over.wait(0.02)):
        continue


def let_go():
    _over.set()


def call_and_forget(to):
    rpc.rpc_async(to, hang, timeout=0)


def await_caller():
    assert _callers.acquire(timeout=PATIENCE)


def sync(victim):
    return rpc.rpc_sync(victim, hang, timeout=0)


def asynchronous(victim):
    return rpc.rpc_async(victim, hang, timeout=0).wait()


def through_a_callback(victim):
    future = rpc.rpc_async(victim, hang, timeout=0)
    return future.then(lambda done: done.value()).wait()


def through_another(victim):
    """A third worker waits for the victim on our behalf."""
    return rpc.rpc_sync(_bystander(victim), sync, args=(victim,), timeout=0)


def barrier(victim):
    return rpc.barrier(timeout=0)


def gather(victim):
    pair = {victim, rpc.get_worker_info().name}
    return rpc.all_gather("x", pair, timeout=0)


SYNC, ASYNC = "begun by rpc_sync", "begun by rpc_async"
CALLS = (sync, asynchronous, through_a_callback, through_another)
MEETINGS = (barrier, gather)


def wait_for(victim):
    """All these operations at once; what came of each, by its name."""
    me = rpc.get_worker_info().name
    found = {}

    def attempt(operation):
        with rpc.use_worker(me):
            found[operation.__name__] = see(operation, victim)

    threads = [
        threading.Thread(target=attempt, args=(operation,), daemon=True)
        for operation in CALLS + MEETINGS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def be_waited_for(others, parts):
    """Begins calls that outlive it, and waits until all others wait for this worker."""
    me = rpc.get_worker_info().name
    first, second = others[-2:]
    for start, word in ((rpc.rpc_sync, SYNC), (_wait, ASYNC)):
        arguments = (me, start, first, [second, first, second], word)
        threading.Thread(target=_begin, args=arguments, daemon=True).start()
    for word in (SYNC, ASYNC):
        rpc.rpc_sync(second, has_begun, args=(word,))
    for _ in range(len(others) * len(CALLS)):
        assert _callers.acquire(timeout=PATIENCE)
    rpc.rpc_sync("worker0", has_arrived, args=(parts,))


def _begin(me, start, to, path, word):
    with rpc.use_worker(me):
        see(start, to, relay, (path, word))


def _wait(to, fn, args):
    return rpc.rpc_async(to, fn, args=args).wait()


def relay(path, word):
    """Waits along a path of workers, without a limit, for what never comes."""
    to, *further = path
    call = (relay, (further, word)) if further else (deferred, (word,))
    seen = see(lambda: rpc.rpc_sync(to, *call, timeout=0))
    with _ended:
        _ends[f"{len(path)} from the end, {word}"] = seen.kind
        _ended.notify_all()


@rpc.async_execution
def deferred(word):
    future = rpc.Future()
    future.add_done_callback(lambda done: _end(word, done))
    with _ended:
        _ends[word] = "begun"
        _ended.notify_all()
    return future


def _end(word, done):
    with _ended:
        _ends[word] = see(done.value).kind
        _ended.notify_all()


def has_begun(word):
    with _ended:
        assert _ended.wait_for(lambda: word in _ends, PATIENCE)


def how_it_ended(word):
    """What came of a call that the lost worker had begun."""
    with _ended:
        assert _ended.wait_for(lambda: _ends.get(word, "begun") != "begun", PATIENCE)
        return _ends[word]


def has_arrived(parts):
    """On rank 0: waits until so many wait at the coordinator for others."""
    coordinator = current.worker().group.coordinator
    until, pause = time.monotonic() + PATIENCE, threading.Event()
    while time.monotonic() < until:
        with coordinator._lock:
            rounds = coordinator._rounds
            arrived = sum(len(one._came) for one in rounds if not one.decided)
        if arrived >= parts:
            return
        pause.wait(0.005)
    raise AssertionError(f"{arrived} of {parts} have arrived")


def await_ends(names):
    """Waits until all these wait for the others to shut down."""
    for name in names:
        rpc.rpc_sync(name, await_end)


def await_end():
    agent = current.worker()
    until, pause = time.monotonic() + PATIENCE, threading.Event()
    while not agent.outstanding._watched and not any(
        asked._purpose == "shutdown"
        for asked in list(agent.group._shared._pending.values())
    ):
        assert time.monotonic() < until
        pause.wait(0.005)


def miss():
    """Waits for everybody."""
    return see(barrier, None)


def asked_by(to):
    """What a worker learns that calls `to` for as long as that lets it."""
    return see(sync, to)


def after_thawing(to):
    """What it learns afterwards, by what it does."""
    attempts = {
        "rpc_sync(max)": lambda: rpc.rpc_sync(to, max, args=(1, 2)),
        "rpc_async(max)": lambda: rpc.rpc_async(to, max, args=(1, 2)).wait(),
        "barrier": rpc.barrier,
        "shutdown": rpc.shutdown,
    }
    return {name: see(attempt) for name, attempt in attempts.items()}


def shut_down():
    """Ends this worker gracefully; what came of it, and of a call after it."""
    seen = see(rpc.shutdown)
    return seen, see(rpc.rpc_sync, 0, max, (1, 2)).text


def name_and_double(x):
    return rpc.get_worker_info().name, 2 * x


def call_each(names, x):
    """Calls every one, in both ways."""
    for name in names:
        assert rpc.rpc_sync(name, name_and_double, args=(x,)) == (name, 2 * x)
        future = rpc.rpc_async(name, name_and_double, args=(x + 1,))
        assert future.wait() == (name, 2 * x + 2)


def meet(names):
    """What those who are left gather, after a barrier among them."""
    rpc.barrier(names)
    return rpc.all_gather(rpc.get_worker_info().id * 11 + 1, names)


def lost():
    return rpc.debug_info()["group.lost"]


def note_what_is_open():
    """Before this process becomes a worker."""
    jax.devices()  # Opens what JAX needs.
    gc.collect()
    _before["threads"] = busy_threads()
    _before["descriptors"] = set(descriptors().items())


def busy_threads():
    """Threads by name, without those of pools that wait for a task.

    The timer hands a task over every second, so that a pool always keeps some.
    """
    names = Counter(thread.name for thread in threading.enumerate())
    for pool in gc.get_objects():
        if type(pool) is ThreadPool:
            names[pool._name] -= len(pool._idle)
    return +names


def what_is_left():
    """Threads and descriptors that were not there before; waits for the last ones."""
    until, pause = time.monotonic() + PATIENCE, threading.Event()
    while True:
        gc.collect()
        threads = busy_threads() - _before["threads"]
        opened = set(descriptors().items()) - _before["descriptors"]
        left = sorted(threads.elements()) + sorted(opened)
        if not left or time.monotonic() > until:
            return left
        pause.wait(0.02)


def sockets_by_name():
    """Abstract Unix sockets of jdist on this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@jdist-" in line}


def my_socket():
    return current.worker().address[2]


def join_in_vain(*place, **options):
    return see(lambda: be_one_of(*place, **options))


def begin_to_join(name, rank, port, size, join):
    """Returns when this process has asked to belong to a group."""
    asked = threading.Event()

    class Asking(CoordinatorClient):
        def join(self, *details):
            future = super().join(*details)
            asked.set()
            return future

    lifecycle.CoordinatorClient = Asking
    arguments = (lambda: join(name, rank, port, size),)
    threading.Thread(target=see, args=arguments, daemon=True).start()
    assert asked.wait(PATIENCE)


def _bystander(victim):
    me = rpc.get_worker_info().name
    names = [info.name for info in rpc.get_worker_infos()]
    return next(name for name in names if name not in (me, victim))
