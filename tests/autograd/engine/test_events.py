"""The event record: the seven steps of the design note's example, in order."""

import itertools

import numpy as np

from jdist import autograd, rpc
from jdist.autograd import Event
from tests.autograd import engine_cases as cases
from tests.autograd.engine_cases import leaves

SEND1 = "send rpc_sync(add) to worker1"
RECV1 = "receive from worker0"
SEND2 = "send answer of call(add) to worker0"
RECV2 = "receive from worker1"
LEAF = "variable"


def counted(worker, *counts):
    return Event(worker, "counted", counts=tuple(sorted(counts)))


def in_order(event):
    return event._replace(counts=tuple(sorted(event.counts)))


def example():
    """t3 = remote add(t1, t2), t5 = mul(t3, t4): pictures (i) and (iv)."""
    t1, t2, t4 = leaves(3, 1)
    with autograd.context() as context_id, autograd.record_events() as events:
        t3 = rpc.rpc_sync("worker1", cases.add, args=(t1, t2))
        t5 = autograd.apply(cases.mul, t3, t4)
        (first,) = autograd.retrieve_context(context_id).send_functions()
        (second,) = autograd.retrieve_context(context_id).recv_functions()
        assert events == []  # the forward pass has none
        autograd.backward(context_id, [t5], mode="fast", cotangents=[t4.value])
        gradients = autograd.get_gradients(context_id)
    weight = t4.value * t4.value
    np.testing.assert_array_equal(gradients[t1], weight)
    np.testing.assert_array_equal(gradients[t2], weight)
    np.testing.assert_array_equal(gradients[t4], t4.value * (t1.value + t2.value))
    return events, first, second


def test_the_seven_steps_of_the_design_note(threads):
    events, first, second = threads.run(0, example)
    steps = [
        # 1. The root counts the dependencies: send1 1, mul 1.
        [counted("worker0", ("mul", 1), (SEND1, 1), *[(LEAF, 1)] * 3, (RECV2, 1))],
        # 2. mul runs, the gradient of t4 accumulates, recv2 sends to worker 1.
        [
            Event("worker0", "ran", "mul"),
            Event("worker0", "accumulated", LEAF),
            Event("worker0", "posted", RECV2, second, "worker1"),
        ],
        # 3. Worker 1 counts send2, add and recv1, which both arguments came by.
        [counted("worker1", (SEND2, 1), ("add", 1), (RECV1, 2))],
        # 4. send2 is queued, 5. add runs, and recv1, 6. which sends to worker 0.
        [
            Event("worker1", "received", SEND2, second, "worker0"),
            Event("worker1", "ran", SEND2, second, "worker0"),
        ],
        [Event("worker1", "ran", "add")],
        [Event("worker1", "posted", RECV1, first, "worker0")],
        [Event("worker1", "ended")],
        # 7. Worker 0 has counted already: send1 is queued and runs, and t1 and t2
        # have their gradients.
        [
            Event("worker0", "received", SEND1, first, "worker1"),
            Event("worker0", "ran", SEND1, first, "worker1"),
            Event("worker0", "accumulated", LEAF),
            Event("worker0", "accumulated", LEAF),
            Event("worker0", "ended"),
        ],
    ]  # fmt: skip
    assert list(map(in_order, events)) == list(itertools.chain.from_iterable(steps))


@autograd.eager
def recording(function, *args):
    """What this worker's engine does in the pass after this call, for `recorded`."""
    _recordings.append(_enter())
    return autograd.apply(function, *args)


_recordings = []


def _enter():
    record = autograd.record_events()
    return record, record.__enter__()


def recorded():
    record, events = _recordings.pop()
    record.__exit__(None, None, None)
    return [tuple(event)[:5] for event in events]


def over_processes():
    x, y = leaves(2, 2)
    with autograd.context() as context_id, autograd.record_events() as events:
        args = (cases.mul, x, y)
        product = rpc.rpc_sync("worker1", recording, args=args)
        autograd.backward(context_id, [product.sum()])
    there = rpc.rpc_sync("worker1", recorded)
    return [event.kind for event in events], [kind for _, kind, *_ in there]


def test_each_process_records_its_own_part(processes):
    here, there = processes.run(0, over_processes)
    assert here == [
        "counted", "ran", "posted", "received", "ran", "accumulated", "accumulated",
        "ended",
    ]  # fmt: skip
    assert there == ["counted", "received", "ran", "ran", "posted", "ended"]


def example_two():
    """d = a + b, e = b * c, backward from d: counts add 1, and mul none."""
    a, b, c = leaves(3, 3)
    with autograd.context() as context_id, autograd.record_events() as events:
        d = autograd.apply(cases.add, a, b)
        autograd.apply(cases.mul, b, c)
        autograd.backward(context_id, [d], mode="fast", cotangents=[a.value])
    assert in_order(events[0]) == counted("worker0", ("add", 1), (LEAF, 1), (LEAF, 1))
    assert [event.name for event in events if event.kind == "ran"] == ["add"]


def test_what_the_roots_do_not_reach_has_no_dependencies(threads):
    threads.run(0, example_two)


def nothing_is_kept():
    x, y = leaves(2, 4)
    with autograd.context() as context_id:
        with autograd.record_events() as outer:
            with autograd.record_events() as inner:
                autograd.backward(context_id, [(x * y).sum()])
            autograd.backward(context_id, [(x * y).sum()])
        autograd.backward(context_id, [(x * y).sum()])
    assert outer == inner + inner
    assert [event.kind for event in inner].count("ended") == 1


def test_recordings_can_be_nested_and_end(threads):
    threads.run(0, nothing_is_kept)
