"""Termination detection: one worker's counts, without messages."""

from types import SimpleNamespace

from jdist.autograd.engine.messages import StarvingSend
from jdist.autograd.engine.termination_detector import (
    TerminationDetector,
    UnansweredRequest,
)
from jdist.rpc import Future


def held(peer):
    return UnansweredRequest(peer, Future())


def test_the_first_request_engages_a_worker_and_the_others_do_not():
    engagement = TerminationDetector("b", root=False)
    first, second, third = held("a"), held("c"), held("a")
    for one in (first, second, third):
        engagement.asked(one)
    assert engagement.engager is first
    assert engagement.take_others() == [second, third]
    assert engagement.take_others() == []
    assert engagement.disengage() is first
    assert engagement.disengage() is None
    engagement.asked(second)
    assert engagement.engager is second


def test_a_root_is_engaged_from_the_beginning():
    engagement = TerminationDetector("a", root=True)
    one = held("b")
    engagement.asked(one)
    assert engagement.disengage() is None
    assert engagement.take_others() == [one]


def test_gradients_can_ride_on_either_kind_of_answer():
    engagement = TerminationDetector("b", root=False)
    assert not engagement.holds("a")
    engagement.asked(held("a"))
    engagement.asked(held("c"))
    assert engagement.holds("a")
    assert engagement.holds("c")
    assert not engagement.holds("d")
    engagement.take_others()
    assert not engagement.holds("c")


ONE = SimpleNamespace(name="send f to c")
OTHER = SimpleNamespace(name="send g to d")
STARVING = {
    11: StarvingSend("b", "send f to c"),
    12: StarvingSend("b", "send g to d"),
}


def test_a_worker_tells_only_what_has_changed():
    engagement = TerminationDetector("b", root=False)
    engagement.waits_for({})
    assert engagement.take_news() == {}
    engagement.waits_for({11: ONE, 12: OTHER})
    assert engagement.take_news() == STARVING
    engagement.waits_for({11: ONE, 12: OTHER})
    assert engagement.take_news() == {}
    engagement.waits_for({12: OTHER})
    assert engagement.take_news() == {11: None}
    engagement.waits_for({})
    assert engagement.take_news() == {12: None}


def test_news_of_others_are_passed_on_and_what_has_come_wins():
    for first, second in ((STARVING, {11: None}), ({11: None}, STARVING)):
        engagement = TerminationDetector("b", root=False)
        engagement.heard(first)
        engagement.heard(second)
        assert engagement.starving() == {12: STARVING[12]}
        assert engagement.take_news() == {11: None, 12: STARVING[12]}
        assert engagement.starving() == {}
