"""Numbers that came before are known, in bounded memory."""

import numpy as np

from jdist.rpc.base.dedup_window import DedupWindow

WINDOW = 100


def take(window, number):
    return window.take(number, number - WINDOW + 1)


def test_every_number_is_new_once(rng):
    """In an order that wanders by less than the window."""
    numbers = np.arange(1, 2001)
    order = np.argsort(numbers + rng.uniform(0, 50, numbers.size), kind="stable")
    came = [int(n) for n in numbers[order]]
    window = DedupWindow(first=1)
    assert all(take(window, number) for number in came)
    assert not any(take(window, number) for number in came)
    assert not window._beyond


def test_numbers_that_never_come_take_no_memory():
    """Every second one is lost; what is remembered stays within twice the window."""
    window = DedupWindow(first=1)
    for number in range(2, 20_000, 2):
        assert take(window, number)
        assert not take(window, number)
        assert len(window._beyond) <= 2 * WINDOW


def test_a_number_from_before_the_window_is_taken_for_old():
    """Rather lost than executed twice; within the window it is new."""
    window = DedupWindow(first=1)
    assert take(window, 1000)
    assert not take(window, 900)
    assert take(window, 901)
    assert not take(window, 1)
    assert take(window, 1001)
