"""The claims of `rref_chain` see a value freed early, kept, copied or never counted."""

import copy

import pytest

from experiments.rref_chain import QUICK, claims

STEPS = QUICK.steps
BYTES = 4 * QUICK.numbers
GOOD = {
    "rounds": [
        {
            "up": [(1, count, False) for count in range(1, STEPS + 1)],
            "down": [(1, 4, False), (1, 2, False), (0, 0, True)],
            "freed": True,
        }
    ],
    "relay": {
        "seen": [(1, 2, False)] * (STEPS - 1),
        "last": (1, 1, False),
        "freed": True,
    },
    "forwarding": {"call": {"frames": 9, "bytes": 900, "array bytes": 0}},
    "fetching": {"reply": {"frames": 1, "bytes": BYTES + 99, "array bytes": BYTES}},
    "same": True,
    "freed after fetching": True,
    "pending": [0, 0, 0],
    "left": (0, 0, True),
}


def failing(**changes):
    found = copy.deepcopy(GOOD)
    found.update(changes)
    return [claim.text for claim in claims(QUICK, found) if not claim.holds]


def with_round(**changes):
    return [GOOD["rounds"][0] | changes]


def test_what_should_hold_does():
    assert failing() == []


SPOILED = {
    "counts one more": {"rounds": with_round(up=[(1, 1, False)] * STEPS)},
    "never freed while": {
        "rounds": with_round(down=[(1, 4, False), (0, 2, True), (0, 0, True)])
    },
    "freed when the last": {"rounds": with_round(freed=False)},
    "the next one still has it": {
        "relay": GOOD["relay"] | {"seen": [(0, 0, False)] * STEPS}
    },
    "moves no byte": {"forwarding": {"call": {"bytes": 900, "array bytes": 1}}},
    "sends at most": {"forwarding": {"call": {"bytes": 1 << 20}}},
    "bit for bit": {"same": False},
    "return to zero": {"pending": [0, 1, 0]},
}


@pytest.mark.parametrize("text", SPOILED)
def test_each_departure_is_seen(text):
    """One claim fails, and it is that one."""
    (found,) = failing(**SPOILED[text])
    assert text in found


def test_a_value_fetched_twice_is_seen():
    twice = {"reply": {"bytes": 2 * BYTES, "array bytes": 2 * BYTES}}
    assert failing(fetching=twice) == ["fetching moves it once, bit for bit"]


def test_a_value_that_outlives_its_fetching_is_seen():
    (found,) = failing(**{"freed after fetching": False})
    assert "freed when the last" in found
