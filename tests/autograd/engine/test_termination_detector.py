"""Termination detection: one worker's counts, without messages."""

from jdist.autograd.engine.messages import StarvationReport, StarvingSend
from jdist.autograd.engine.termination_detector import (
    TerminationDetector,
    UnansweredRequest,
)


def held(peer):
    return UnansweredRequest(peer)


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


ONE = StarvingSend(11, "c", "send f to c")
OTHER = StarvingSend(12, "d", "send g to d")


def test_a_worker_reports_only_what_has_changed():
    engagement = TerminationDetector("b", root=False)
    engagement.waits_for(())
    assert engagement.news() == {}
    engagement.waits_for((ONE, OTHER))
    assert engagement.news() == {"b": StarvationReport(1, (ONE, OTHER))}
    engagement.waits_for((ONE, OTHER))
    assert engagement.news() == {}
    engagement.waits_for(())
    assert engagement.news() == {"b": StarvationReport(2, ())}


def test_reports_of_others_are_passed_on_and_later_ones_win():
    engagement = TerminationDetector("b", root=False)
    engagement.heard({"c": StarvationReport(2, ()), "d": StarvationReport(1, (OTHER,))})
    engagement.heard({"c": StarvationReport(1, (ONE,))})
    assert engagement.news() == {
        "c": StarvationReport(2, ()),
        "d": StarvationReport(1, (OTHER,)),
    }
    assert engagement.starving() == {"d": (OTHER,)}
    engagement.heard({"d": StarvationReport(2, ())})
    assert engagement.starving() == {}
