"""Numbers that came before are known, in bounded memory."""

import numpy as np

from jdist.rpc.wire.frame import Duplicates


def test_every_number_is_new_once(rng):
    """In an order that wanders by less than the window."""
    numbers = np.arange(1, 2001)
    order = np.argsort(numbers + rng.uniform(0, 50, numbers.size), kind="stable")
    came = [int(n) for n in numbers[order]]
    seen = Duplicates(window=100)
    assert all(seen.is_new(number) for number in came)
    assert not any(seen.is_new(number) for number in came)
    assert not seen._beyond


def test_numbers_that_never_come_take_no_memory():
    """Every second one is lost; what is remembered stays within the window."""
    seen = Duplicates(window=100)
    for number in range(2, 20_000, 2):
        assert seen.is_new(number)
        assert not seen.is_new(number)
        assert len(seen._beyond) <= 100


def test_a_number_from_before_the_window_is_taken_for_old():
    """Rather lost than executed twice; within the window it is new."""
    seen = Duplicates(window=100)
    assert seen.is_new(1000)
    assert not seen.is_new(900)
    assert seen.is_new(901)
    assert not seen.is_new(1)
    assert seen.is_new(1001)
