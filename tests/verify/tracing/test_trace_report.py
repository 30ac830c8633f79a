"""What a trace is said to have found, word for word, and how shares are told."""

import re

import numpy as np
import pytest

from jdist import VerificationError
from jdist.verify.report import LeafReport, OracleCheck, Report
from jdist.verify.tracing.fault_localization import (
    TOLD,
    _beyond_taps,
    _examples,
    _of_shares,
    _partition,
    _scaled_before,
)
from jdist.verify.tracing.report import (
    UNCOMPARED,
    Difference,
    Trace,
    _list,
    ranges,
)
from jdist.verify.tracing.search import Findings

RIGHT = LeafReport("candidate", "b", "float32", (3,), 0.0, 0.0, 0.0, 0.0, 1.0)
WRONG = LeafReport("candidate", "w", "float32", (2, 3), 1.0, 1.0, 9.0, 31.0, 0.5,
                   problem="off by 31 times the bound")  # fmt: skip
HIDDEN = LeafReport("candidate", "v", "float32", (2,), unjudged="zero would pass too")
HERE = Difference("forward", "block7/mlp", (12,), 31.25, "expected 1, got 2")
PINNED = OracleCheck(1.0, 1.0, 1e-8)


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        (HERE, "forward, block7/mlp, example 12: 31.2 bounds: expected 1, got 2"),
        (
            Difference("backward", "head", (0, 1, 2, 5), float("inf"), "lost"),
            "backward, head, examples 0-2, 5: missing: lost",
        ),
        (
            Difference("forward", "head", (3, 9), 0.5, "off"),
            "forward, head, examples 3, 9: 0.5 bounds: off",
        ),
        (Difference("loss", "(loss)", (), 4.0, "off"), "loss, (loss): 4 bounds: off"),
    ],
)
def test_a_difference_in_one_line(difference, line):
    assert str(difference) == line


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((4,), "4"),
        ((4, 5), "4-5"),
        ((7, 0, 2, 1), "0-2, 7"),
        ((0, 2, 4), "0, 2, 4"),
        ((9, 10, 12, 13, 11, 20), "9-13, 20"),
    ],
)
def test_runs_of_numbers_are_abridged(numbers, text):
    assert ranges(numbers) == text


def test_of_many_names_the_ends_are_listed():
    """Six are shown; of eight, the first and the last three."""
    names = list("abcdefgh")
    assert _list([]) == "nothing"
    assert _list(names[:6]) == "a, b, c, d, e, f"
    assert _list(tuple(names[:7])) == "a, b, c, ... (1 more) ..., e, f, g"
    assert _list(names) == "a, b, c, ... (2 more) ..., f, g, h"


def test_a_trace_says_place_chain_leaves_and_notes():
    """In this order, each on a line."""
    report = Report((RIGHT, WRONG, HIDDEN), PINNED, ("of the report",))
    trace = Trace(report, HERE, ("forward embed", "forward block6"), ("of the trace",))
    assert str(trace).splitlines() == [
        "WRONG",
        f"first difference: {HERE}",
        "right before it: forward embed, forward block6",
        "3 leaves judged; wrong: w",
        "not judged: v",
        str(PINNED),
        "note: of the report",
        "note: of the trace",
    ]
    assert str(Trace(Report((RIGHT,)), None, ("forward embed",))).splitlines() == [
        "right",
        "right before it: forward embed",
        "1 leaves judged",
    ]
    hidden = str(Trace(Report((RIGHT, HIDDEN)), None, ())).splitlines()
    assert hidden[:2] == ["not judged", "no tap differs"]
    assert hidden[2] == "right before it: nothing"
    # A tap may differ in a right candidate, which its place then shows.
    beside = str(Trace(Report((RIGHT,)), HERE, ())).splitlines()
    assert beside[:2] == ["right", f"first difference: {HERE}"]


@pytest.mark.parametrize(
    ("difference", "place"),
    [(HERE, f"first difference: {HERE}"), (None, "no tap differs")],
)
def test_the_error_of_a_trace_begins_with_the_place(difference, place):
    """The leaves follow, as the report names them; its cause is not repeated."""
    trace = Trace(Report((RIGHT, WRONG)), difference, ())
    assert not trace.ok
    words = f"{place}\ngradients differ:\n  candidate: w: off by 31 times the bound"
    with pytest.raises(VerificationError, match=f"^{re.escape(words)}$") as caught:
        trace.raise_if_failed()
    assert caught.value.__suppress_context__
    right = Trace(Report((RIGHT,)), None, ())
    assert right.raise_if_failed() is right


@pytest.mark.parametrize("direction", ["forward", "backward", "gradient", "loss"])
def test_a_fault_that_no_tap_shows_is_said_to_be_behind_them(direction):
    """In the first sentence; not where a tap shows it, or none was compared."""
    place = Difference(direction, "w", (), 4.0, "off")
    seen = ("forward a", "forward b", "backward b")
    first = (
        "all taps that were compared are right (values: 2; cotangents, up to factors "
        "of examples: 1): the fault is behind them"
    )
    behind = direction in ("gradient", "loss")
    report = Report((RIGHT, WRONG))
    for right, notes, said in (
        (seen, (), [first] if behind else []),
        ((), (), []),
        ((), (UNCOMPARED,), [UNCOMPARED]),
    ):
        trace = Trace(report, place, right, notes)
        lines = [*said, f"first difference: {place}"]
        assert str(trace).splitlines()[1 : len(lines) + 1] == lines
        with pytest.raises(VerificationError, match=re.escape("\n".join(lines))):
            trace.raise_if_failed()


# --- shares of examples ---

PLACE = ("w", 31.0, "off by 31 times")
WEIGHTS = np.array([1.0, 2.0, 0.5, 3.0, 1.5, 2.5])


def told(groups, found, factors=None, entered=""):
    findings = Findings(factors=factors or {}, entered=entered)
    return _of_shares(findings, groups, found, PLACE, WEIGHTS)


def test_the_examples_that_count_wrongly_are_listed():
    """Those that count once are not; of many groups the first few are told."""
    difference = told([(0, 3), (1,), (2, 4, 5)], [1, 2, 0])
    assert (difference.direction, difference.tap) == ("gradient", "w")
    assert difference.examples == (1, 2, 4, 5)
    assert difference.words == (
        "examples 1 count 2 times; examples 2, 4-5 count 0 times; off by 31 times"
    )
    alone = [(e,) for e in range(6)]
    many = told(alone, [2, 3, 4, 5, 1, 7]).words
    assert many.count(" count ") == TOLD
    assert "examples 5" not in many


def test_one_factor_of_all_is_said_once():
    """Only if it is the same to three digits."""
    alone = [(e,) for e in range(6)]
    assert told(alone, [0.5] * 6).words == "all examples count 0.5 times; " + PLACE[2]
    assert told(alone, [0.5] * 5 + [0.75]).words.startswith("examples 0 count 0.5 tim")
    assert told(alone, [1] + [0.5] * 5).words.startswith("examples 1 count 0.5 times")
    nearly = told(alone[:2], [0.5001, 0.5004]).words
    assert nearly.startswith("all examples count 0.5001 times")
    apart = told(alone[:2], [0.6, 0.9]).words
    assert apart.startswith("examples 0 count 0.6 times; examples 1 count 0.9 times")


GROUPS = [(0, 1, 2), (3, 4), (5,)]
SHARES = [1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("unit", "before"),
    [
        ("the mean of the batch", True),
        ("sums of the calls", True),
        ("weighted means of the calls", True),
        ("none", False),
    ],
)
def test_whether_the_cotangents_have_the_wrong_shares_already(unit, before):
    """In whatever unit the trainer differentiates: the batch's mean, or its calls'."""
    divided = {
        "the mean of the batch": lambda g: 1.0,
        "sums of the calls": lambda g: 1 / len(g),
        "weighted means of the calls": lambda g: 1 / WEIGHTS[list(g)].sum(),
        "none": lambda g: 1 / SHARES[GROUPS.index(g)],
    }[unit]
    factors = {
        e: complex(0.125 * share * divided(group))
        for group, share in zip(GROUPS, SHARES, strict=True)
        for e in group
    }
    assert _scaled_before(factors, GROUPS, SHARES, WEIGHTS) == before
    difference = told(GROUPS, SHARES, factors, "head")
    assert difference.direction == ("backward" if before else "gradient")
    assert difference.tap == ("head" if before else "w")
    assert difference.words.startswith("examples 3-4 count 2 times")
    # Where no tap has shown a factor, nothing was scaled before.
    assert told(GROUPS, SHARES, factors).direction == "gradient"


def test_one_factor_for_all_is_known_by_itself_alone():
    """Any unit would explain it, so only cotangents of that very size do."""
    twice = dict.fromkeys(range(6), 2.0 + 0j)
    assert _scaled_before(twice, GROUPS, [2.0] * 3, WEIGHTS)
    once = dict.fromkeys(range(6), 1.0 + 0j)
    assert not _scaled_before(once, GROUPS, [2.0] * 3, WEIGHTS)
    sums = {e: 2.0 / len(g) + 0j for g in GROUPS for e in g}
    assert not _scaled_before(sums, GROUPS, [2.0] * 3, WEIGHTS)


def test_factors_and_shares_agree_to_a_hundredth():
    """A lost example has no factor; where none that counts once has one, none fits."""
    alone = [(e,) for e in range(6)]
    ones = dict.fromkeys(range(1, 6), 1.0 + 0j)
    twice = [2.0] + [1.0] * 5
    assert _scaled_before({0: 2.025 + 0j, **ones}, alone, twice, WEIGHTS)
    assert not _scaled_before({0: 2.035 + 0j, **ones}, alone, twice, WEIGHTS)
    assert _scaled_before(ones, alone, [0.0] + [1.0] * 5, WEIGHTS)
    assert not _scaled_before({0: 2.0 + 0j}, alone, twice, WEIGHTS)


def test_examples_without_a_call_are_groups_of_their_own():
    """Those without a weight are in none."""
    counted = np.array([True, True, False, True, True, False])
    assert _partition([(3, 0), (2, 5)], counted) == [(3, 0), (1,), (4,)]
    assert _partition((), counted) == [(0,), (1,), (3,), (4,)]


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (np.zeros((6, 2)), 6),
        ({"x": np.zeros((6, 2)), "y": np.zeros(6)}, 6),
        ({"x": np.zeros((6, 2)), "y": np.zeros(5)}, None),
        ({"x": np.zeros((6, 2)), "step": np.zeros(())}, None),
        (np.float32(1), None),
    ],
)
def test_the_number_of_examples_is_that_of_all_leaves(batch, count):
    assert _examples(batch) == count


def beyond(*leaves, parts=lambda: None, gradient=None, groups=(), weights=WEIGHTS):
    report, findings = Report((RIGHT, *leaves)), Findings(groups=list(groups))
    return _beyond_taps(report, findings, gradient, parts, weights)


def test_where_all_taps_are_right_the_worst_leaf_is_named(rng):
    """A leaf that is not finite is the worst; the loss only where it is alone."""
    loss = LeafReport("candidate", "(loss)", "float32", (), ratio=8.0, problem="off")
    assert beyond(loss) == Difference("loss", "(loss)", (), 8.0, "off")
    found = beyond(loss, WRONG)
    assert (found.direction, found.tap, found.ratio) == ("gradient", "w", 31.0)
    assert found.words == WRONG.problem
    lost = LeafReport("candidate", "u", "float32", (2,), problem="not finite")
    found = beyond(WRONG, lost)
    assert (found.tap, found.words) == ("u", "not finite; 2 leaves are wrong")

    def parts():
        raise AssertionError("examples' parts of nothing are not computed")

    assert beyond(lost, parts=parts).words == "not finite"


def test_a_lost_call_and_a_lost_example_are_told_apart(rng):
    """First by the calls of the backward pass, then example by example."""
    each = {"w": rng.normal(size=(6, 40))}
    calls = [(0, 3), (1,), (2, 4, 5)]
    lost = {"w": each["w"][[0, 1, 3]].sum(axis=0)}
    found = beyond(WRONG, parts=lambda: each, gradient=lost, groups=calls)
    assert found.examples == (2, 4, 5)
    assert found.words == ("examples 2, 4-5 count 0 times; off by 31 times the bound")
    # Fewer numbers tell calls, and not examples.
    few, less = {"w": each["w"][:, :8]}, {"w": lost["w"][:8]}
    found = beyond(WRONG, parts=lambda: few, gradient=less, groups=calls)
    assert found.examples == (2, 4, 5)
    # A part of a call: the calls do not explain it, the examples do.
    part = {"w": each["w"][[0, 1, 3, 4, 5]].sum(axis=0)}
    found = beyond(WRONG, parts=lambda: each, gradient=part, groups=calls)
    assert found.examples == (2,)
    assert found.words.startswith("examples 2 count 0 times; ")
    # Noise has no shares.
    noise = {"w": rng.normal(size=40)}
    found = beyond(WRONG, parts=lambda: each, gradient=noise, groups=calls)
    assert (found.examples, found.words) == ((), WRONG.problem)


def test_examples_of_one_share_are_told_together(rng):
    """To three digits; and those that do not count are no examples."""
    each = {"w": rng.normal(size=(6, 40))}
    counts = np.array([1.5001, 1.5004, 1.6, 1, 1, 1])
    found = beyond(
        WRONG, parts=lambda: each, gradient={"w": counts @ each["w"]},
        groups=[(0, 1, 2, 3, 4, 5)],
    )  # fmt: skip
    assert found.words.startswith(
        "examples 0-1 count 1.5 times; examples 2 count 1.6 times; "
    )
    weights = np.array([0.5, 0, 2, 1, 0, 1])
    each = {"w": weights[:, None] * each["w"]}
    found = beyond(
        WRONG, parts=lambda: each, gradient={"w": 1.5 * each["w"].sum(0)},
        weights=weights,
    )  # fmt: skip
    assert found.examples == (0, 2, 3, 5)
    assert found.words.startswith("all examples count 1.5 times; ")
    # Four that count are told by as few as eight numbers, and six are not.
    few = {"w": each["w"][:, :8]}
    wrong = {"w": np.array([1.5, 1, 1.25, 1, 1, 1]) @ few["w"]}
    found = beyond(
        WRONG, parts=lambda: few, gradient=wrong, groups=[tuple(range(6))],
        weights=weights,
    )  # fmt: skip
    assert found.examples == (0, 2)
