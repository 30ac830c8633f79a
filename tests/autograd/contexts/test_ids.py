"""Ids: 64 bits, the worker in the top 16, ascending, unique."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.autograd.contexts import Ids, maker

WORKERS = st.integers(0, (1 << 16) - 1)


@given(WORKERS)
def test_an_id_has_its_worker_on_top(worker):
    ids = Ids(worker)
    for make in (ids.context, ids.message):
        first, second = make(), make()
        assert second == first + 1
        assert first >> 48 == worker == maker(first)
        assert 0 <= first < second < 1 << 64


@given(WORKERS)
def test_the_highest_is_torchs(worker):
    highest = Ids(worker, first=(1 << 48) - 1).context()
    assert highest == 281474976710655 + (worker << 48)
    assert maker(highest) == worker


def test_contexts_and_messages_are_counted_apart():
    ids = Ids(5)
    ids.context()
    ids.context()
    assert ids.message() == (5 << 48) + 1


def test_no_message_has_the_id_of_none():
    assert Ids(0).message() == 1


@pytest.mark.parametrize("kind", ["context", "message"])
def test_the_last_id_is_given_and_no_more(kind):
    ids = Ids(7, first=(1 << 48) - 2)
    make = getattr(ids, kind)
    highest = (8 << 48) - 1
    assert [make(), make()] == [highest - 1, highest]
    for _ in range(2):
        with pytest.raises(OverflowError, match="Worker 7 has no ids left"):
            make()
