"""Who may come back to a place where a group is ending."""

from jdist.rpc.crew import Crew
from jdist.rpc.member import Member
from jdist.rpc.roster import Roster
from jdist.rpc.worker_info import WorkerInfo


def member(name, rank):
    """One that asks to join; nothing is sent to it."""
    return Member(WorkerInfo(name, rank), None, None, Crew("nobody", 2))


def complete_group():
    """Two workers, both there."""
    roster, members = Roster(2), [member("first", 0), member("second", 1)]
    answers = [roster.add(one, 2) for one in members]
    assert [len(each) for each in answers] == [0, 2]
    return roster, members


def test_who_left_may_come_back_under_another_name():
    """The process of rank 1 has left, and is early for the next group."""
    roster, (_, second) = complete_group()
    second.left = True
    assert roster.is_ending(WorkerInfo("again", 1))
    assert roster.is_ending(WorkerInfo("second", 0))
    assert not roster.is_ending(WorkerInfo("stranger", 0))


def test_nobody_comes_back_to_a_group_that_is_whole():
    """A double is told so at once."""
    roster, _ = complete_group()
    assert not roster.is_ending(WorkerInfo("again", 1))
    ((_, refusal),) = roster.add(member("again", 1), 2)
    assert "Rank 1 is not unique: second and again have it." in refusal.meta["error"]
