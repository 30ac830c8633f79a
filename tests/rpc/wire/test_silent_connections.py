"""Connections on which nothing comes have no thread, and lose no frame by that."""

import random
import socket
import threading
import time

import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current, thread_pool
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire import connection as connection_module
from jdist.rpc.wire import silent_connections
from jdist.rpc.wire.channel import ChannelClosed, Reader
from jdist.rpc.wire.connection import Connection, Terms
from jdist.rpc.wire.frame import Frame, pack
from jdist.rpc.wire.in_process import Hub, InProcessTransport
from jdist.rpc.wire.silent_connections import SilentConnections
from jdist.rpc.wire.stream import Stream
from tests.rpc.group.test_liveness import DEATH, Group, results
from tests.rpc.hosts import names
from tests.rpc.sockets import PATIENCE, Peers, call, nothing_left, soon, wait_until

ROUTES = ["unix", "tcp", "tls"]


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture
def pool():
    pool = ThreadPool("readers", 8)
    yield pool
    assert pool.close(PATIENCE) == []


@pytest.fixture
def impatient(monkeypatch):
    """Threads leave a connection after milliseconds, and end without one."""
    monkeypatch.setattr(thread_pool, "_IDLE_SECONDS", 2e-3)
    monkeypatch.setattr(connection_module, "PATIENCE", 2e-3)
    monkeypatch.setattr(SilentConnections, "few_read", False)


class Served:
    """Channels of which every frame is answered, and why each one ended."""

    def __init__(self):
        self.channels = []
        self.ends = []

    def __call__(self, channel):
        self.channels.append(channel)

        def answer(frame):
            channel.send(Frame("reply", frame.id, {}, frame.tree, frame.leaves))

        def end(reason):
            channel.close(reason)
            self.ends.append(reason)

        channel.read(Reader(answer, end))


@pytest.fixture
def served():
    return Served()


def silent_ones(silent):
    """How many connections are silent."""
    selector = silent._selector
    # The thread that waits may close the selector meanwhile.
    return 0 if selector is None else len(selector.get_map() or ())


def all_silent(transport, count):
    silent = transport._silent
    return lambda: (silent_ones(silent), silent.reading) == (count, 0)


def readers():
    """The threads that read, wait, or are idle in the pool."""
    return [one for one in threading.enumerate() if one.name == "there reads"]


# --- threads ---


def test_silent_connections_have_one_thread(served, impatient):
    with Peers(on_channel=served) as peers:
        channels = [peers.connect() for _ in range(24)]
        for channel in channels:
            assert channel.exchange(call(1), soon()).id == 1
        wait_until(all_silent(peers.there, 24))
        wait_until(lambda: len(readers()) == 1)
        for channel in channels:
            assert channel.exchange(call(2), soon()).id == 2
        wait_until(lambda: len(readers()) == 1)


def test_many_busy_connections_to_one_peer_have_few_threads(served):
    """Threads leave them soon, if they are more than the peers."""
    with Peers(on_channel=served) as peers:
        channels = [peers.connect() for _ in range(24)]
        for number in range(1, 6):
            for channel in channels:
                assert channel.exchange(call(number), soon()).id == number
        few, silent = silent_connections._FEW, peers.there._silent
        wait_until(lambda: silent_ones(silent) >= 24 - few and silent.reading <= few)


def test_workers_of_one_process_have_no_thread_for_a_silent_channel(monkeypatch):
    """What remains are one thread for time each, and idle ones that end."""
    monkeypatch.setattr(thread_pool, "_IDLE_SECONDS", 2e-3)
    count = 6
    before = set(threading.enumerate())
    with rpc.local_cluster(names(count)):
        for caller in names(count):
            with rpc.use_worker(caller):
                rpc.wait_all(
                    [rpc.rpc_async(to, max, args=(2, 3)) for to in names(count)]
                )
                assert rpc.rpc_sync("worker1", max, args=(2, 3), timeout=PATIENCE) == 3
        wait_until(lambda: len(set(threading.enumerate()) - before) == count + 1)


# --- frames ---


@pytest.mark.parametrize("route", ROUTES)
def test_a_frame_ends_the_silence(served, impatient, route):
    with Peers(route, on_channel=served) as peers:
        channel = peers.connect()
        for number, size in enumerate([3, 3, 100_000, 2_000_000, 3], start=1):
            sent = np.arange(float(size))
            answer = channel.exchange(call(number, sent), soon())
            np.testing.assert_array_equal(np.asarray(answer.leaves[0]), sent)
            wait_until(all_silent(peers.there, 1))
        channel.close()
        wait_until(lambda: served.ends)


@pytest.mark.parametrize("route", ROUTES)
def test_frames_that_come_together_are_all_taken(served, impatient, route):
    """Also those that TLS has decrypted, or not yet, when the socket is empty."""
    with Peers(route, on_channel=served) as peers:
        channel = peers.connect()
        wait_until(all_silent(peers.there, 1))
        for first in range(1, 200, 10):  # few enough for the socket's buffer
            numbers = range(first, first + 10)
            for number in numbers:
                channel.send(call(number, np.ones(number % 7 * 500)))
            assert [channel.receive(soon()).id for _ in numbers] == [*numbers]
        wait_until(all_silent(peers.there, 1))


def test_a_frame_may_begin_with_its_first_byte_alone(served, impatient, pool):
    """The thread that comes for it stays until the frame is complete."""
    ours, theirs = socket.socketpair()
    silent = SilentConnections((), pool)
    with theirs:
        theirs.settimeout(PATIENCE)
        channel = Connection(Stream(ours), "raw", Terms(), silent)
        reading = threading.Thread(target=served, args=(channel,))
        reading.start()
        wait_until(lambda: silent_ones(silent) == 1)
        (data,) = pack(call(1))
        for byte in data[:-1]:
            theirs.send(bytes([byte]))
            wait_until(lambda: (silent_ones(silent), silent.reading) == (0, 1))
            time.sleep(4e-3)  # longer than threads wait for a frame to begin
        assert silent_ones(silent) == 0
        theirs.send(data[-1:])
        assert theirs.recv(1 << 16)
        wait_until(lambda: silent_ones(silent) == 1)
        channel.close("the end")
        reading.join(PATIENCE)
        wait_until(lambda: served.ends == ["the end"])
        wait_until(lambda: not silent._watched)
        silent.close()


def test_half_a_frame_in_silence_is_cut_off(served, impatient):
    with Peers(on_channel=served) as peers:
        peers.there._terms = peers.there._terms._replace(stall=0.05)
        channel = peers.connect()
        wait_until(all_silent(peers.there, 1))
        channel._stream.send([pack(call(1))[0][:5]], soon())
        with pytest.raises(ChannelClosed, match="its connection closed"):
            channel.receive(soon())
        wait_until(lambda: served.ends)
        assert "in the middle of a frame" in served.ends[0]


@pytest.mark.parametrize("route", ROUTES)
def test_threads_come_and_go_two_hundred_times_under_load(served, impatient, route):
    """Frames come at any moment of a thread's leaving; each is answered, in order."""
    wrong = []

    def drive(channel, seed):
        rng = random.Random(seed)
        for number in range(1, 201):
            if channel.exchange(call(number), soon()).id != number:
                wrong.append((seed, number))
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 5e-3))
        channel.close()

    with Peers(route, on_channel=served) as peers:
        threads = [
            threading.Thread(target=drive, args=(peers.connect(), seed), daemon=True)
            for seed in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        wait_until(lambda: len(served.ends) == 8)
        wait_until(all_silent(peers.there, 0))


def test_frames_within_a_process_come_at_any_moment():
    hub, number = Hub(), 4000
    a, b = InProcessTransport("a", hub), InProcessTransport("b", hub)
    taken, ended = [], threading.Event()

    def serve(channel):
        take = lambda frame: taken.append(frame.id)  # noqa: E731
        channel.read(Reader(take, lambda reason: ended.set()))

    b.serve(serve)
    channel = a.connect("b", b.address, None)
    for sent in range(1, number + 1):
        channel.send(call(sent))
        if sent % 50 == 0:
            wait_until(lambda: len(taken) == sent)  # noqa: B023 - called at once
    wait_until(lambda: len(taken) == number)
    assert taken == [*range(1, number + 1)]
    channel.close()
    assert ended.wait(PATIENCE)
    a.close()
    b.close()


# --- ends ---


@pytest.mark.parametrize("route", ROUTES)
def test_closing_a_silent_connection_ends_it_at_once(served, impatient, route):
    with Peers(route, on_channel=served) as peers:
        channels = [peers.connect() for _ in range(3)]
        wait_until(all_silent(peers.there, 3))
        served.channels[0].close("of this side")
        wait_until(lambda: served.ends == ["of this side"])
        with pytest.raises(ChannelClosed, match="its connection closed"):
            _other(channels).receive(soon())
        wait_until(all_silent(peers.there, 2))
        peers.there.close()
        wait_until(lambda: len(served.ends) == 3)
        assert peers.there._connections == set()


@pytest.mark.parametrize("route", ROUTES)
def test_the_thread_that_waits_ends_all_that_close(
    served, impatient, route, monkeypatch
):
    """It starts no thread for any of them, and takes what came before the end."""
    started = []
    with Peers(route, on_channel=served) as peers:
        pool = peers.there._threads
        start = pool.start
        channels = [peers.connect() for _ in range(20)]
        wait_until(all_silent(peers.there, 20))
        monkeypatch.setattr(pool, "start", lambda task: started.append(task))
        for channel in channels[:10]:
            channel.close()
        wait_until(lambda: len(served.ends) == 10)
        for channel in served.channels[:20]:
            channel.close()
        wait_until(lambda: len(served.ends) == 20)
        assert started == []
        monkeypatch.setattr(pool, "start", start)


def _other(channels):
    """The one of which the other end was closed."""
    found = []
    wait_until(lambda: found.extend(c for c in channels if not c.usable()) or found)
    return found[0]


def test_a_transport_with_many_silent_connections_closes_promptly(served, impatient):
    with Peers(on_channel=served) as peers:
        for _ in range(100):
            peers.connect()
        wait_until(all_silent(peers.there, 100))
        begun = time.monotonic()
        peers.there.close()
        assert time.monotonic() - begun < 1.0  # after which it leaves threads to end
        wait_until(lambda: served.ends == ["this worker has ended"] * 100)


def test_many_threads_close_a_silent_connection(served, impatient):
    for _ in range(20):
        with Peers(on_channel=served) as peers:
            channel = peers.connect()
            wait_until(all_silent(peers.there, 1))
            ends = [served.channels[-1]] * 4 + [channel] * 4
            threads = [threading.Thread(target=end.close) for end in ends]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
    wait_until(lambda: len(served.ends) == 20)


def test_a_reader_that_fails_closes_the_connection(impatient, caplog):
    ends = []

    def serve(channel):
        def take(frame):
            raise ZeroDivisionError(frame.tree)

        def end(reason):
            channel.close(reason)
            ends.append(reason)

        channel.read(Reader(take, end))

    with Peers(on_channel=serve) as peers:
        channel = peers.connect()
        wait_until(all_silent(peers.there, 1))
        channel.send(call(1))
        with pytest.raises(ChannelClosed, match="its connection closed"):
            channel.receive(soon())
        wait_until(lambda: ends)
        assert "its reader failed: ZeroDivisionError" in ends[0]
        other = peers.connect()
        wait_until(all_silent(peers.there, 1))
        other.close()


# --- without threads, descriptors, or a selector ---


def test_without_another_thread_to_lead_each_connection_is_read(
    served, impatient, monkeypatch
):
    """The system refuses new threads for a while."""
    with Peers(on_channel=served) as peers:
        channels = [peers.connect() for _ in range(4)]
        wait_until(all_silent(peers.there, 4))

        def refuse(task):
            return False

        with monkeypatch.context() as patch:
            patch.setattr(peers.there._threads, "start", refuse)
            for number in range(1, 20):
                for channel in channels:
                    assert channel.exchange(call(number), soon()).id == number
        wait_until(all_silent(peers.there, 4))


def test_where_nothing_waits_for_it_a_connection_keeps_its_thread(
    served, impatient, monkeypatch
):
    with Peers(on_channel=served) as peers:
        channel = peers.connect()
        wait_until(lambda: peers.there._accepting is not None)

        def refuse():
            raise OSError("too many open files")

        monkeypatch.setattr(silent_connections.selectors, "DefaultSelector", refuse)
        for number in range(1, 5):
            assert channel.exchange(call(number), soon()).id == number
            time.sleep(5e-3)


# --- workers ---


def leave_soon():
    SilentConnections.few_read = False


def wait_for_ever():
    threading.Event().wait()


def reason_while_silent(victim):
    """Waits for a call on a silent connection; returns which worker was lost."""
    silent = current.worker()._transport._silent
    future = rpc.rpc_async(victim, wait_for_ever, timeout=0)
    wait_until(lambda: silent_ones(silent) and not silent.reading)
    rpc.rpc_async("worker1", note_silence)
    try:
        future.wait(PATIENCE)
    except rpc.WorkerLost as error:
        return error.worker
    return None


_noted = threading.Event()


def note_silence():
    _noted.set()


def await_silence():
    assert _noted.wait(PATIENCE)


def test_a_worker_killed_in_silence_is_lost_by_name(fresh_hosts):
    made = fresh_hosts(3)
    made.everywhere(leave_soon)
    group = Group(made, DEATH, 2)
    waiting = group.start(reason_while_silent, group.lost, ranks=[0])
    results(group.start(await_silence, ranks=[1]))
    group.hit()
    assert waiting[0].result() == group.lost
    group.end()
