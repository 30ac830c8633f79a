"""Who may join a group, of both kinds, and who is told what; without any channels."""

import itertools

import pytest

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import MOST_WORKERS, WorkerInfo
from jdist.rpc.group.membership import LATE, Member, Membership
from jdist.rpc.wire.frame import ERROR, REPLY

_numbers = itertools.count(1)


class Line:
    """A channel of which only the name matters."""

    def __init__(self, peer):
        self.peer = peer


def member(name, rank):
    """One that asks to join; nothing is sent to it."""
    made = Member(WorkerInfo(name, rank), None, Line(name), ThreadPool("membership", 2))
    made.request = next(_numbers)
    return made


def told(answers):
    """Texts and the workers that they were sent to, in order."""
    return [(to.info.name, frame.kind) for to, frame in answers]


def leave(group, one, left=True):
    """What everybody is told because one has gone, beside that."""
    one.left, one.gone = left, "left" if left else "killed"
    return group.remove(one), group.advance(one)


# --- a fixed size ---


def complete_group():
    group, members = Membership(2), [member("first", 0), member("second", 1)]
    answers = [group.add(one, 2) for one in members]
    assert [told(each) for each in answers] == [[], [("first", "group.probe")]]
    answers = group.confirmed(members[0], number_in(answers[1]))
    assert told(answers) == [("first", REPLY), ("second", REPLY)]
    return group, members


def number_in(answers):
    """The number by which the last message that was sent is to be confirmed."""
    return answers[-1][1].meta["confirm"]


def test_who_left_may_come_back_under_another_name():
    """The process of rank 1 has left, and is early for the next group."""
    group, (_, second) = complete_group()
    second.left = True
    assert group.is_ending(WorkerInfo("again", 1))
    assert group.is_ending(WorkerInfo("second", 0))
    assert not group.is_ending(WorkerInfo("stranger", 0))


def test_nobody_comes_back_to_a_group_that_is_whole():
    """A double is told so once the one who has its rank has shown that it lives."""
    group, (_, second) = complete_group()
    assert not group.is_ending(WorkerInfo("again", 1))
    asked = group.add(member("again", 1), 2)
    ((_, refusal),) = group.confirmed(second, number_in(asked))
    assert "Rank 1 is not unique: second and again have it." in refusal.meta["error"]
    second.gone = "killed"
    ((_, refusal),) = group.add(member("second", 1), 2)
    assert "No worker takes the place of one that is lost" in refusal.meta["error"]


def test_who_died_while_joining_is_replaced():
    """Before its end was noticed: nobody is told that the name is not unique."""
    group, dead, successor = Membership(2), member("a", 1), member("a", 1)
    assert group.add(dead, 2) == []
    assert told(group.add(successor, 2)) == [("a", "group.probe")]
    assert group.until() is None
    assert leave(group, dead, left=False) == (False, [])
    answers = group.add(member("b", 0), 2)
    assert told(answers) == [("a", "group.probe")]
    answers = group.confirmed(successor, number_in(answers))
    assert told(answers) == [("b", REPLY), ("a", REPLY)]
    assert answers[1][0] is successor


def test_a_group_is_complete_when_all_live():
    """One who died unnoticed is replaced, although all seemed to be there."""
    group, dead, first = Membership(3), member("a", 1), member("b", 0)
    last = member("c", 2)
    assert group.add(dead, 3) == group.add(first, 3) == []
    answers = group.add(last, 3)
    assert told(answers) == [("a", "group.probe"), ("b", "group.probe")]
    assert group.confirmed(first, number_in(answers)) == []
    assert leave(group, dead, left=False) == (False, [])
    assert group.present() == []
    old, successor = number_in(answers), member("a", 1)
    answers = group.add(successor, 3)
    assert told(answers) == [("b", "group.probe"), ("c", "group.probe")]
    for one in (first, last):  # That is no answer to this probe.
        assert group.confirmed(one, old) == []
    assert group.confirmed(first, number_in(answers)) == []
    answers = group.confirmed(last, number_in(answers))
    assert told(answers) == [("b", REPLY), ("a", REPLY), ("c", REPLY)]


def test_somebody_is_silent():
    group, frozen, last = Membership(2), member("a", 0), member("b", 1)
    last.until = 7.0
    group.add(frozen, 2)
    group.add(last, 2)
    answers = group.expire(7.0)
    assert {one for one, _ in answers} == {frozen, last}
    assert answers[0][1].meta["error"].endswith("Here: a (0), b (1). Silent: a.")


def test_strangers_are_told_of_while_some_are_missing():
    """Each once, a bounded number, to those who wait and those who come later."""
    group, members = Membership(3), [member(f"w{rank}", rank) for rank in range(3)]
    assert group.add(members[0], 3) == []
    tellings = [
        told(group.refused(f"stranger {number}.")) for number in [0, 0, *range(1, 20)]
    ]
    once = [("w0", "group.stranger")]
    assert tellings == [once, [], *[once] * 7, *[[]] * 12]
    later = group.add(members[1], 3)
    assert told(later) == [("w1", "group.stranger")] * 8
    texts = [frame.meta["text"] for _, frame in later]
    assert texts == [f"stranger {number}." for number in range(8)]
    for one in members[:2]:
        one.until = 5.0
    refusals = group.expire(6.0)
    assert told(refusals) == [("w0", ERROR), ("w1", ERROR)]
    assert refusals[0][1].meta["error"].endswith(" ".join(texts))
    assert group.refused("another.") == []


def test_who_lives_keeps_its_name():
    group, first, double = Membership(3), member("a", 1), member("a", 2)
    other = member("b", 2)
    assert group.add(first, 3) == []
    probe = number_in(group.add(double, 3))
    assert group.add(other, 3) == []  # The double's rank is not taken yet.
    assert group.confirmed(first, probe - 1) == []
    answers = group.confirmed(first, probe)
    assert {one for one, _ in answers} == {first, double, other}
    for _, frame in answers:
        assert "Workers 1 and 2 share the same name." in frame.meta["error"]
    assert group.all_told()


def test_a_double_is_refused_when_the_others_are_complete():
    group, first, last = Membership(2), member("a", 0), member("b", 1)
    double = member("b", 1)
    group.add(first, 2)
    probe = number_in(group.add(last, 2))
    again = number_in(group.add(double, 2))
    answers = group.confirmed(first, probe)
    assert told(answers) == [("a", REPLY), ("b", REPLY)]
    ((one, refusal),) = group.confirmed(last, again)
    assert one is double
    assert "RPC worker name b is not unique." in refusal.meta["error"]
    assert group.failure is None


def test_doubles_wait_no_longer_than_they_want():
    group, first, double = Membership(2), member("a", 0), member("a", 1)
    double.until = 5.0
    group.add(first, 2)
    group.add(double, 2)
    assert group.until() == 5.0
    assert group.expire(4.9) == []
    answers = group.expire(5.0)
    assert {one for one, _ in answers} == {first, double}
    assert all(frame.meta["kind"] == LATE for _, frame in answers)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (2, 0, "b was given none, the coordinator a world_size"),
        (0, 2, "b was given a world_size of 2, the coordinator none"),
    ],
)
def test_the_two_kinds_are_not_mixed(ours, theirs, text):
    group, newcomer = Membership(ours), member("b", 1)
    ((one, refusal),) = group.add(newcomer, theirs)
    assert one is newcomer
    assert "RPC group mixes statically and dynamically" in refusal.meta["error"]
    assert text in refusal.meta["error"]


# --- an elastic one ---


def elastic(*names):
    """An elastic group of these, by rank."""
    group, members = Membership(0), []
    for rank, name in enumerate(names):
        members.append(member(name, rank))
        let_in(group, members[-1])
    return group, members


def let_in(group, newcomer):
    """All say that they know the newcomer; what is told at the end."""
    answers = asked = group.add(newcomer, 0)
    for other in group.present():
        if other is not newcomer:
            assert not any(one is newcomer for one, _ in answers)
            answers = group.confirmed(other, number_in(asked))
    return answers


def test_a_newcomer_is_let_in_when_all_know_it():
    group, (a, b) = elastic("a", "b")
    c = member("c", 2)
    asked = group.add(c, 0)
    assert told(asked) == [("a", "group.coming"), ("b", "group.coming")]
    assert group.confirmed(a, number_in(asked)) == []
    assert group.confirmed(a, number_in(asked)) == []
    assert c not in group.present()
    answers = group.confirmed(b, number_in(asked))
    assert told(answers) == [("c", REPLY)]
    rows = answers[0][1].meta["members"]
    assert [row[:3] for row in rows] == [["a", 0, 0], ["b", 1, 1], ["c", 2, 2]]


def test_one_after_the_other_and_rank_0_first():
    group, late, b, c = (
        Membership(0),
        member("a", 0),
        member("b", 1),
        member("c", 2),
    )
    assert group.add(c, 0) == group.add(b, 0) == []
    asked = group.add(late, 0)
    assert told(asked) == [("a", REPLY), ("a", "group.coming")]
    answers = group.confirmed(late, number_in(asked))
    assert told(answers) == [("c", REPLY), ("a", "group.coming"), ("c", "group.coming")]


def test_who_goes_is_not_waited_for():
    group, (a, b) = elastic("a", "b")
    c = member("c", 2)
    asked = group.add(c, 0)
    assert group.confirmed(a, number_in(asked)) == []
    belonged, answers = leave(group, b, left=False)
    assert belonged
    assert told(answers) == [("c", REPLY)]
    assert [row[0] for row in answers[0][1].meta["members"]] == ["a", "c"]


def test_a_newcomer_that_dies_makes_room_for_the_next():
    group, (a,) = elastic("a")
    dead, successor = member("b", 1), member("b", 1)
    group.add(dead, 0)
    assert told(group.add(successor, 0)) == [("b", "group.probe")]
    belonged, answers = leave(group, dead, left=False)
    assert belonged  # The others had been told of it.
    assert told(answers) == [("a", "group.coming")]
    answers = group.confirmed(a, number_in(answers))
    assert answers[0][0] is successor
    assert group.gone("b") is None


def test_names_and_ranks_come_again_and_numbers_never():
    group, (_, b) = elastic("a", "b")
    assert leave(group, b) == (True, [])
    second = member("b", 1)
    assert told(let_in(group, second))[0] == ("b", REPLY)
    assert (b.info.incarnation, second.info.incarnation) == (1, MOST_WORKERS - 1)
    assert second.info == b.info
    leave(group, second, left=False)
    assert group.gone("b") == "killed"
    third = member("c", 1)
    let_in(group, third)
    assert third.info.incarnation == MOST_WORKERS - 2
    last = member("x", MOST_WORKERS - 1)  # Its rank was somebody's number.
    let_in(group, last)
    assert last.info.incarnation == MOST_WORKERS - 3


def test_who_lives_keeps_its_rank_and_the_group_goes_on():
    group, (_, b) = elastic("a", "b")
    double = member("c", 1)
    ((one, refusal),) = group.confirmed(b, number_in(group.add(double, 0)))
    assert one is double
    assert "Rank 1 is not unique: b and c have it." in refusal.meta["error"]
    assert told(let_in(group, member("c", 2)))[0] == ("c", REPLY)


def test_a_newcomer_waits_no_longer_than_it_wants():
    group, (a, b) = elastic("a", "b")
    first, second = member("c", 2), member("d", 3)
    first.until, second.until = 5.0, 6.0
    asked = group.add(first, 0)
    group.add(second, 0)
    group.confirmed(a, number_in(asked))
    ((one, refusal),) = group.expire(5.5)
    assert one is first
    assert "c was not let in in time: b did not say" in refusal.meta["error"]
    assert refusal.meta["kind"] == LATE
    assert group.until() == 6.0
    leave(group, first, left=False)
    assert group.expire(6.5)[0][0] is second
    assert b in group.present()


def test_nobody_is_let_in_at_the_end():
    group, _ = elastic("a", "b")
    entering, waiting = member("c", 2), member("d", 3)
    group.add(entering, 0)
    group.add(waiting, 0)
    assert not group.is_ending(WorkerInfo("e", 4))
    assert group.close() == [waiting, entering]
    assert group.is_ending(WorkerInfo("e", 4))
    leave(group, entering, left=False)
    assert [one.info.name for one in group.present()] == ["a", "b"]


def test_numbers_come_to_an_end():
    """Every worker that ever belonged has had one."""
    group, _ = elastic("a")
    group._incarnations = set(range(MOST_WORKERS))
    answers = group.add(member("b", 1), 0)
    assert told(answers) == [("b", ERROR)]
    assert "has had 65536 workers" in answers[0][1].meta["error"]
