"""When a pass is quiet everywhere: the bookkeeping of one worker, without messages."""

from jdist.autograd.engine.messages import Report, Starving
from jdist.autograd.engine.termination_detector import Engagement, Held
from jdist.rpc import Future


def held(peer):
    return Held(peer, Future())


def test_the_first_request_engages_a_worker_and_the_others_do_not():
    engagement = Engagement("b", root=False)
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
    engagement = Engagement("a", root=True)
    one = held("b")
    engagement.asked(one)
    assert engagement.disengage() is None
    assert engagement.take_others() == [one]


def test_gradients_can_ride_on_either_kind_of_answer():
    engagement = Engagement("b", root=False)
    assert not engagement.holds("a")
    engagement.asked(held("a"))
    engagement.asked(held("c"))
    assert engagement.holds("a")
    assert engagement.holds("c")
    assert not engagement.holds("d")
    engagement.take_others()
    assert not engagement.holds("c")


ONE = Starving(11, "c", "send f to c")
OTHER = Starving(12, "d", "send g to d")


def test_a_worker_reports_only_what_has_changed():
    engagement = Engagement("b", root=False)
    engagement.waits_for(())
    assert engagement.news() == {}
    engagement.waits_for((ONE, OTHER))
    assert engagement.news() == {"b": Report(1, (ONE, OTHER))}
    engagement.waits_for((ONE, OTHER))
    assert engagement.news() == {}
    engagement.waits_for(())
    assert engagement.news() == {"b": Report(2, ())}


def test_reports_of_others_are_passed_on_and_later_ones_win():
    engagement = Engagement("b", root=False)
    engagement.heard({"c": Report(2, ()), "d": Report(1, (OTHER,))})
    engagement.heard({"c": Report(1, (ONE,))})
    assert engagement.news() == {"c": Report(2, ()), "d": Report(1, (OTHER,))}
    assert engagement.starving() == {"d": (OTHER,)}
    engagement.heard({"d": Report(2, ())})
    assert engagement.starving() == {}
