"""Messages of reference counting to workers that read slowly, over small sockets.

Their handlers run on the thread that reads, which then waits to send its answer.
"""

import threading
import time

from jdist import rpc
from jdist.rpc.calls.callee import ServedConnection
from jdist.rpc.rref import reliable_delivery
from jdist.rpc.wire import stream
from jdist.rpc.wire.shared_connection import SharedConnection
from tests.rpc.hosts import become_worker
from tests.rpc.rref.common import NOTHING, identity, value_of, wait_for_references

COUNT = 150
_serving = threading.local()
_waits = []


def read_slowly():
    """Answers are read slowly here, and few bytes fit into a socket."""
    stream.BUFFER = 1  # the kernel takes its least, a few kilobytes
    reliable_delivery._LARGEST_BATCH = 1  # each message by itself
    take, serve = SharedConnection._take, ServedConnection._serve
    wait_for_room = stream.Stream._wait_for_room

    def take_slowly(self, frame):
        time.sleep(2e-3)
        take(self, frame)

    def note_thread(self, execution, frame, reading=False):
        _serving.inline = reading
        try:
            serve(self, execution, frame, reading)
        finally:
            _serving.inline = False

    def note_wait(self, *args):
        if getattr(_serving, "inline", False):
            _waits.append(None)
        wait_for_room(self, *args)

    SharedConnection._take = take_slowly
    ServedConnection._serve = note_thread
    stream.Stream._wait_for_room = note_wait


def exchange_references(other):
    """Makes, passes and drops many; how often an inline answer found a full socket."""
    made = [rpc.remote(other, identity, args=(number,)) for number in range(COUNT)]
    own = [rpc.RRef(number) for number in range(COUNT)]
    sent = [rpc.rpc_async(other, value_of, args=(ref,)) for ref in (*made, *own)]
    assert rpc.wait_all(sent) == [*range(COUNT)] * 2
    del made, own, sent
    wait_for_references(user_rrefs=0, forks_under_way=0)
    return len(_waits)


def test_no_message_is_lost_where_answers_wait_for_full_sockets(fresh_hosts):
    """Both workers at once, so that each waits for the other one to read."""
    made = fresh_hosts(2)
    made.everywhere(read_slowly)
    made.everywhere(become_worker, leaks="error")
    tasks = [
        made.start(rank, exchange_references, f"worker{1 - rank}") for rank in (0, 1)
    ]
    waits = [task.result() for task in tasks]
    assert sum(waits) > 0
    made.everywhere(wait_for_references, **NOTHING)
    made.everywhere(rpc.shutdown)
