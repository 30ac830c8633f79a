"""The tables of an SPMD program, played by hand with names in the place of arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist import pipeline
from jdist.pipeline.schedule.actions import B, F, W
from jdist.pipeline.spmd.table import INPUTS, NOTHING, assign_slots, tabulate

FAMILIES = {
    "gpipe": pipeline.gpipe,
    "1F1B": pipeline.one_f_one_b,
    "zero bubble": pipeline.zero_bubble,
    "interleaved": lambda n, m: pipeline.interleaved(n, n * m, 2),
    "looped": lambda n, m: pipeline.looped_bfs(n, m, 3),
    "ZBV": pipeline.zbv,
    "V-Half": pipeline.v_half,
    "V-Min": pipeline.v_min,
    "DualPipeV": lambda n, m: pipeline.dualpipe_v(n, m + 2 * n),
}


class Device:
    """One worker: what lies in its slots."""

    def __init__(self, table, worker, schedule):
        self.stages = table.stages[worker]
        self.worker = worker
        self.last = schedule.stages - 1
        self.mail = [None] * table.slots.mail
        self.activations = [None] * table.slots.activations
        self.rests = [None] * table.slots.rests

    def act(self, at):
        """What is done at a clock, as an action; every value must be in its place."""
        if at.kind == NOTHING:
            return None
        stage, micro = int(self.stages[at.chunk]), int(at.micro_batch)
        if at.kind == F:
            if stage:
                assert self.mail[at.mail] == ("value", stage, micro)
            else:
                assert at.mail == NOTHING
            self.fill(self.activations, at.activation, (stage, micro))
            name = "value" if stage < self.last else "cotangent"
            result = name, min(stage + 1, self.last), micro
        elif at.kind in (B, INPUTS):
            assert self.mail[at.mail] == ("cotangent", stage, micro)
            assert self.activations[at.activation] == (stage, micro)
            result = "cotangent", stage - 1, micro
            if at.kind == INPUTS:
                self.fill(self.rests, at.rest, (stage, micro))
        else:
            assert self.rests[at.rest] == (stage, micro)
            assert self.activations[at.activation] == (stage, micro)
            self.rests[at.rest] = result = None
        if at.kind in (B, W):
            self.activations[at.activation] = None
        if at.kind != W:
            if at.mail != NOTHING:
                self.mail[at.mail] = None
            self.mail[-1] = None  # What was sent is not needed any more.
            self.fill(self.mail, at.result, result)
        return "FBWB"[at.kind], stage, micro

    def fill(self, slots, slot, value):
        assert slots[slot] is None
        slots[slot] = value


def check_what_is_done_somewhere(table, clock, stages):
    """By some worker at least: all of them may do it in step."""
    done = zip(table.row.kind[clock], table.row.chunk[clock], strict=True)
    done = [(*each, worker) for worker, each in enumerate(done) if each[0] != NOTHING]
    expected = {(kind, chunk) for kind, chunk, _ in done}
    assert {*zip(*np.nonzero(table.clock.acts[clock]), strict=True)} == expected
    last = [kind for kind, c, worker in done if table.stages[worker, c] == stages - 1]
    assert table.clock.ends[clock] == (last == [0])


def play(schedule, overlap):
    """The actions of each worker, in order."""
    table = tabulate(schedule, overlap)
    devices = [Device(table, w, schedule) for w in range(schedule.workers)]
    done = [[] for _ in devices]
    for clock in range(len(table.clock.ends)):
        under_way = [device.mail[-1] for device in devices]
        for device, program in zip(devices, done, strict=True):
            row = [column[clock, device.worker] for column in table.row]
            action = device.act(type(table.row)(*row))
            program += [action] if action else []
        check_what_is_done_somewhere(table, clock, schedule.stages)
        for number, distance in enumerate(table.distances):
            senders = np.arange(schedule.workers)
            arrives = table.row.receive[clock, (senders + distance) % len(devices)]
            arrived = (arrives[:, number] != NOTHING).any()
            assert table.clock.travels[clock, number] == arrived
            for sender, slots in enumerate(arrives):
                if slots[number] != NOTHING:
                    receiver = devices[(sender + distance) % len(devices)]
                    message = devices[sender].mail[-1]
                    message = under_way[sender] if overlap else message
                    receiver.fill(receiver.mail, slots[number], message)
    for device in devices:
        assert not any([*device.mail[:-1], *device.activations, *device.rests])
    return table, done


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 2), (4, 6)])
def test_every_value_is_where_it_is_looked_for(family, n, m, overlap):
    """No slot is written to before its value was used, and nothing is left over."""
    schedule = FAMILIES[family](n, m)
    table, done = play(schedule, overlap)
    assert done == [[tuple(a) for a in schedule.actions(w)] for w in range(n)]
    open_at_once = [0]
    for worker in range(n):
        count = 0  # From F until nothing is left to do for it.
        for kind, stage, i in schedule.actions(worker):
            count += kind == "F"
            open_at_once.append(count)
            count -= kind == ("W" if schedule.split[stage, i] else "B")
    assert table.slots.activations == max(open_at_once)
    assert table.slots.rests <= table.slots.activations
    assert 0 not in table.distances


def test_1f1b_needs_no_more_slots_for_more_micro_batches():
    few, many = (tabulate(pipeline.one_f_one_b(4, m)).slots for m in (4, 40))
    assert few == many == (3, 4, 0)
    assert tabulate(pipeline.gpipe(4, 40)).slots.activations == 40


def test_a_message_under_way_takes_a_clock():
    """The last of four stages begins six clocks after the first, and not three."""
    schedule = pipeline.gpipe(4, 8)
    plain, beside = (tabulate(schedule, overlap) for overlap in (False, True))
    kinds = [table.row.kind for table in (plain, beside)]
    assert [int((k[:, 3] != NOTHING).argmax()) for k in kinds] == [3, 6]
    # Each way three more; the actions lie as close together as before.
    assert [len(k) for k in kinds] == [schedule.clocks, schedule.clocks + 2 * 3]
    assert beside.slots.activations == plain.slots.activations == 8


def test_a_clock_without_messages_is_known():
    """Of two workers under 1F1B the first ends with 0B0 and the last begins 1F1."""
    table = tabulate(pipeline.one_f_one_b(2, 4))
    assert table.distances == (1,)
    assert table.clock.travels[:6, 0].tolist() == [1, 1, 1, 0, 1, 0]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 6)), max_size=30
    )
)
def test_slots_are_as_few_as_can_be(spans):
    """Two in one slot never overlap; as many slots as are needed at a time."""
    worker, begin, length = np.array(spans, int).reshape(-1, 3).T
    end = begin + length
    slot, count = assign_slots(worker, begin, end)
    most = 0
    for own in range(3):
        for clock in range(20):
            held = (worker == own) & (begin <= clock) & (clock < end)
            assert len(set(slot[held])) == held.sum()
            most = max(most, held.sum())
    assert count == most
