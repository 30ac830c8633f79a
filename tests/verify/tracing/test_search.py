"""The first difference among taps, of trainers that are made of numbers alone.

Three taps of unequal widths, with values and cotangents drawn at random; a trainer is
what it passes there, call by call. So each rule of the search has a trainer that keeps
it and one that breaks nothing else.
"""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.verify.tracing.layout import Layout
from jdist.verify.tracing.recording import TapRecord
from jdist.verify.tracing.reference import Passage, Rows
from jdist.verify.tracing.search import STALE, search

EXAMPLES, BOUND = 7, 1e-6
WIDTHS = {"first": 4, "second": 6, "third": 3}
PARTS = ((0, 1, 2), (3, 4), (5, 6))
RIGHT = [f"forward {x}" for x in WIDTHS] + [f"backward {x}" for x in reversed(WIDTHS)]


def rows(values):
    return Rows(values, np.full(values.shape, BOUND))


def passage(name, values, cotangents=None, label=None, axis=0):
    """A passage with an axis of examples, or with `axis=None` a value of the batch."""
    layout = Layout(values.shape, axis, 1)
    whole = [x if axis == 0 or x is None else x.reshape(1, -1)
             for x in (values, cotangents)]  # fmt: skip
    flowing = None if cotangents is None else rows(whole[1])
    return Passage(name, label or name, layout, rows(whole[0]), flowing)


@dataclasses.dataclass
class Reference:
    """Values and cotangents by tap, each with a row for each example."""

    values: dict
    cotangents: dict

    def passages(self):
        return [passage(t, self.values[t], self.cotangents[t]) for t in self.values]

    def forward(self, tap, part, change=lambda x: x):
        return TapRecord(tap, 0, change(self.values[tap][list(part)]), None)

    def backward(self, tap, part, factor=1.0):
        factor = np.reshape(factor, (-1, 1))
        own = self.values[tap][list(part)], factor * self.cotangents[tap][list(part)]
        return TapRecord(tap, 0, *own)

    def trained(self, parts=PARTS, factors=(1.0, 1.0, 1.0)):
        """The records of a right trainer that multiplies each call's cotangents."""
        pairs = list(zip(parts, factors, strict=True))
        return [self.forward(t, part) for part, _ in pairs for t in self.values] + [
            self.backward(t, part, x) for part, x in pairs for t in reversed(WIDTHS)
        ]


@pytest.fixture
def reference(rng):
    return drawn(rng)


def drawn(rng):
    sizes = {tap: (EXAMPLES, width) for tap, width in WIDTHS.items()}
    values, cotangents = (
        {tap: rng.normal(size=size) for tap, size in sizes.items()} for _ in range(2)
    )
    return Reference(values, cotangents)


def found(reference, records, counted=(True,) * EXAMPLES):
    return search(reference.passages(), records, np.array(counted))


def changed(records, tap, backward, change):
    """The same records; `change(array)` of those of one tap in one direction."""
    for each in records:
        if each.name != tap or (each.cotangent is not None) != backward:
            yield each
        elif backward:
            yield each._replace(cotangent=change(each.cotangent.copy(), each.value))
        else:
            yield each._replace(value=change(each.value.copy()))


def of_example(reference, tap, example, change):
    """Changes the cotangent of one example, which is known by its value."""

    def on(cotangents, values):
        own = (values == reference.values[tap][example]).all(axis=1)
        cotangents[own] = change(cotangents[own])
        return cotangents

    return on


# --- right trainers ---


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_right_trainers_split_reorder_pad_and_scale_as_they_like(data, seed):
    """Parts in any order, padding by copies, bubbles of other numbers, own factors."""
    rng = np.random.default_rng(seed)
    reference = drawn(rng)
    order = data.draw(st.permutations(range(EXAMPLES)))
    cuts = sorted(data.draw(st.sets(st.integers(1, EXAMPLES - 1), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, EXAMPLES], strict=True)]
    factors = [data.draw(st.sampled_from([0.25, 1.0, -3.0, 1e4])) for _ in parts]
    records = reference.trained(parts, factors)
    bubbles = [
        TapRecord(t, 0, rng.normal(size=(2, w)), None) for t, w in WIDTHS.items()
    ]
    padding = [reference.forward(tap, [order[0]] * 2) for tap in WIDTHS]
    # In any order: threads and workers deliver as they come.
    mixed = data.draw(st.permutations([*bubbles, *padding]))
    findings = found(reference, [*mixed[:2], *records, *mixed[2:]])
    assert findings.difference is None
    assert findings.right == RIGHT
    assert findings.notes == []
    assert findings.entered == "third"
    assert findings.groups == [tuple(sorted(part)) for part in parts]
    for part, factor in zip(parts, factors, strict=True):
        for example in part:
            assert findings.factors[example] == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("factor", [0.25, 2.0, -1.0])
def test_of_several_losses_the_one_that_is_wrong_in_absolute_terms_is_named(
    reference, factor
):
    """The last tap is of an auxiliary loss; a common factor is legitimate."""
    records = list(changed(reference.trained(), "third", True, lambda x, _: factor * x))
    findings = found(reference, records)
    assert (findings.difference.direction, findings.difference.tap) == (
        "backward", "third",
    )  # fmt: skip
    words = "the negative" if factor == -1 else f"{factor:g} times"
    assert findings.difference.words.partition("; ")[2].startswith("it is ")
    assert words in findings.difference.words or factor == -1
    assert findings.right == RIGHT[:3]
    all_of = changed(reference.trained(), "second", True, lambda x, _: factor * x)
    all_of = changed(all_of, "third", True, lambda x, _: factor * x)
    all_of = changed(all_of, "first", True, lambda x, _: factor * x)
    assert found(reference, list(all_of)).difference is None


def test_replicas_count_once_and_shards_of_a_row_are_added_up(reference):
    """A call that is made twice with the same bits; a row in two halves."""
    records = reference.trained()
    assert found(reference, records + records).difference is None
    halves = [
        each._replace(cotangent=each.cotangent * mask)
        for each in records if each.cotangent is not None
        for mask in (np.arange(each.cotangent.shape[1]) % 2 == p for p in (0, 1))
    ]  # fmt: skip
    forward = [each for each in records if each.cotangent is None]
    assert found(reference, forward + halves).difference is None
    # Halves whose sum is half of the row, at one tap only, are no right cotangent.
    lost = [x for i, x in enumerate(halves) if x.name != "second" or i % 2]
    difference = found(reference, forward + lost).difference
    assert (difference.direction, difference.tap) == ("backward", "second")
    assert difference.examples == tuple(range(EXAMPLES))


def test_what_arrives_backwards_alone_is_compared_forwards_too(reference):
    """Records of another process may hold its backward pass alone."""
    records = [x for x in reference.trained() if x.cotangent is not None]
    assert found(reference, records).right == RIGHT
    wrong = [
        x._replace(value=x.value * 2) if x.name == "second" else x for x in records
    ]
    assert found(reference, wrong).difference.direction == "forward"


# --- values ---


@pytest.mark.parametrize("tap", WIDTHS)
@pytest.mark.parametrize("example", [0, 4, 6])
def test_a_wrong_value_is_named_by_tap_example_and_entry(reference, tap, example):
    """The first tap of several wrong ones; the entry that is off by most bounds."""

    def change(values):
        own = (values == reference.values[tap][example]).all(axis=1)
        values[own, 1] += 3.0
        values[own, 2] -= 5.0
        return values

    records = list(changed(reference.trained(), tap, False, change))
    findings = found(reference, records)
    difference = findings.difference
    assert (difference.direction, difference.tap) == ("forward", tap)
    assert difference.examples == (example,)
    assert difference.ratio == pytest.approx(5.0 / BOUND)
    expected = reference.values[tap][example, 2]
    assert difference.words.startswith(
        f"expected {expected:.6g}, got {expected - 5:.6g} at [2] of example {example}; "
        "its cosine with the reference is "
    )
    assert findings.right == RIGHT[: list(WIDTHS).index(tap)]


def test_the_tap_before_tells_which_row_is_which_example(reference):
    """All rows of a call are wrong: its order is that of the call before."""
    order = (5, 2, 6, 0, 3, 1, 4)
    parts = (order[:3], order[3:])
    records = reference.trained(parts, (1.0, 1.0))
    # One direction for all rows, in which nothing can be recognized.
    flat = np.random.default_rng(3).normal(size=(1, WIDTHS["second"]))
    numbers = {}

    def change(values):
        for i, row in enumerate(values):
            example = int(np.flatnonzero((reference.values["second"] == row).all(1))[0])
            numbers[example] = example + 10.0
            values[i] = flat[0] * (example + 10.0)
        return values

    wrong = list(changed(records, "second", False, change))
    difference = found(reference, wrong).difference
    assert difference.examples == tuple(range(EXAMPLES))
    got = np.array([numbers[e] for e in range(EXAMPLES)])[:, None] * flat
    apart = np.abs(got - reference.values["second"])
    example, entry = np.unravel_index(apart.argmax(), apart.shape)
    assert difference.ratio == pytest.approx(apart.max() / BOUND)
    assert f"at [{entry}] of example {example};" in difference.words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: 1.5 * x, "it is 1.5 times the reference"),
        (lambda x: -x, "it is -1 times the reference"),
        (lambda x: 0 * x, "it is 0 times the reference"),
    ],
)
def test_a_factor_of_all_values_is_recognized(reference, change, words):
    """Over all examples together, each beside its own."""
    records = list(changed(reference.trained(), "first", False, change))
    difference = found(reference, records).difference
    assert difference.words.endswith(f"; {words}")
    assert difference.examples == tuple(range(EXAMPLES))


def test_an_example_without_a_row_is_missing_unless_it_counts_for_nothing(reference):
    """Also among rows of other examples; a weight of 0 excuses it."""
    parts = ((0, 1, 2), (4,), (5, 6))
    difference = found(reference, reference.trained(parts)).difference
    assert (difference.direction, difference.tap) == ("forward", "first")
    assert difference.examples == (3,)
    assert difference.ratio == math.inf
    assert difference.words == "no such value is computed"
    assert str(difference) == (
        "forward, first, example 3: missing: no such value is computed"
    )
    counted = [e != 3 for e in range(EXAMPLES)]
    assert found(reference, reference.trained(parts), counted).right == RIGHT


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named_with_its_place(reference, value):
    """In a row whose other entries are right."""

    def change(values):
        values[(values == reference.values["third"][4]).all(axis=1), 1] = value
        return values

    records = list(changed(reference.trained(), "third", False, change))
    difference = found(reference, records).difference
    assert difference.ratio == math.inf
    assert difference.words == f"not finite: {value:.6g} at [1] of example 4"


def test_a_value_of_another_tap_or_with_its_axes_exchanged_is_recognized(rng):
    """Taps of the same row shape; square rows; the tap before tells whose they are."""
    lead = rng.normal(size=(5, 2))
    one, other = rng.normal(size=(2, 5, 3, 3))
    flat = [rows(x.reshape(5, 9)) for x in (one, other)]
    passages = [passage("lead", lead)] + [
        Passage(name, name, Layout((5, 3, 3), 0, 1), own, None)
        for name, own in zip(("one", "other"), flat, strict=True)
    ]
    for wrong, words in (
        (other, "it is the reference's other"),
        (one.swapaxes(1, 2), "it is the reference's one transposed"),
    ):
        values = {"lead": lead, "one": wrong, "other": other}
        records = [TapRecord(name, 0, x[::-1], None) for name, x in values.items()]
        difference = search(passages, records, np.ones(5, bool)).difference
        assert difference.tap == "one"
        apart = np.abs(wrong - one)
        example, *entry = np.unravel_index(apart.argmax(), apart.shape)
        assert difference.words == (
            f"expected {one[example, *entry]:.6g}, got {wrong[example, *entry]:.6g} "
            f"at [{entry[0]}, {entry[1]}] of example {example}; {words}"
        )


# --- cotangents ---


@pytest.mark.parametrize("tap", ["first", "second"])
def test_a_cotangent_must_keep_the_factor_of_the_last_tap(reference, tap):
    """The taps behind it are right, and are listed."""
    double = of_example(reference, tap, 4, lambda x: 2 * x)
    records = list(changed(reference.trained(factors=(1, 0.5, 1)), tap, True, double))
    findings = found(reference, records)
    difference = findings.difference
    assert (difference.direction, difference.tap) == ("backward", tap)
    assert difference.examples == (4,)
    largest = 0.5 * np.abs(reference.cotangents[tap][4]).max()
    # The bound is that of a cotangent half as large, and the slack of the factor.
    slack = np.linalg.norm(BOUND * reference.cotangents["third"][4])
    slack /= np.linalg.norm(reference.cotangents["third"][4]) ** 2
    sizes = np.abs(reference.cotangents[tap][4])
    wanted = (sizes / (BOUND + slack * sizes)).max()
    assert difference.ratio == pytest.approx(wanted, rel=1e-6)
    assert largest < difference.ratio
    assert difference.words.endswith("; it is 2 times the reference")
    assert findings.right == RIGHT[: RIGHT.index(f"backward {tap}")]


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({0: 2, 3: 2, 5: 2}, "it is 2 times the reference"),
        (
            {0: 2, 3: 0.75, 4: 2, 5: 0.75},
            "examples 0, 4 count 2 times; examples 3, 5 count 0.75 times",
        ),
        ({0: 2, 3: 0.75, 5: 3}, "its cosine with the reference is "),
    ],
)
def test_examples_of_which_cotangents_count_otherwise_are_told(
    reference, factors, words
):
    """In groups of one factor: of few examples, each may have one by accident."""
    records = reference.trained()
    for example, factor in factors.items():
        times = of_example(reference, "second", example, lambda x, by=factor: by * x)
        records = list(changed(records, "second", True, times))
    difference = found(reference, records).difference
    assert (difference.direction, difference.tap) == ("backward", "second")
    assert difference.examples == tuple(factors)
    assert f"; {words}" in difference.words


def test_a_wrong_direction_at_the_last_tap_is_no_factor(reference):
    """There the factor is fitted, and explains a multiple only."""

    def turned(x):
        return x[:, ::-1]

    wrong = of_example(reference, "third", 2, turned)
    records = list(changed(reference.trained(), "third", True, wrong))
    difference = found(reference, records).difference
    assert (difference.direction, difference.tap) == ("backward", "third")
    assert difference.examples == (2,)
    assert "its cosine with the reference is" in difference.words


def test_a_lost_cotangent_is_missing_unless_the_example_counts_for_nothing(reference):
    """All examples of a call whose backward pass stops."""
    zero = [of_example(reference, "second", e, lambda x: 0 * x) for e in PARTS[1]]
    records = reference.trained()
    for each in zero:
        records = list(changed(records, "second", True, each))
    difference = found(reference, records).difference
    assert (difference.direction, difference.tap) == ("backward", "second")
    assert difference.examples == PARTS[1]
    assert difference.words == "no cotangent arrives"
    assert difference.ratio == math.inf
    counted = [e not in PARTS[1] for e in range(EXAMPLES)]
    assert found(reference, records, counted).difference is None


def test_stale_values_in_the_backward_pass_are_told(reference):
    """Cotangents beside values that the forward pass did not have."""
    stale = [
        x._replace(value=x.value + 0.5) if x.cotangent is not None else x
        for x in reference.trained()
    ]
    difference = found(reference, stale).difference
    assert (difference.direction, difference.tap) == ("backward", "third")
    assert difference.examples == tuple(range(EXAMPLES))
    assert (difference.ratio, difference.words) == (math.inf, STALE)
    # At an earlier tap alone no cotangent arrives at the values of the forward pass.
    later = [
        x._replace(value=x.value + 0.5)
        if x.cotangent is not None and x.name == "second" else x
        for x in reference.trained()
    ]  # fmt: skip
    difference = found(reference, later).difference
    assert (difference.tap, difference.words) == ("second", STALE)


def test_cotangents_of_zero_beside_strange_values_are_padding(reference, rng):
    """Numbers there would be stale values; zeros are a bubble's."""
    strange = rng.normal(size=(2, WIDTHS["third"]))
    bubble = TapRecord("third", 0, strange, np.zeros_like(strange))
    assert found(reference, [*reference.trained(), bubble]).difference is None
    records = [x for x in reference.trained()
               if x.cotangent is None or x.name != "third"]  # fmt: skip
    for cotangents, words in ((0 * strange, None), (strange, STALE)):
        passed = TapRecord("third", 0, strange, cotangents)
        others = [reference.backward("third", part) for part in PARTS[:2]]
        difference = found(reference, [*records, *others, passed]).difference
        if words is not None:
            assert (difference.examples, difference.words) == (PARTS[2], words)
        else:
            assert difference is None or difference.words != STALE


def test_a_trainer_that_shows_no_backward_pass_is_right_as_far_as_it_goes(reference):
    """Cotangents that none of its taps shows are not missing."""
    records = [x for x in reference.trained() if x.cotangent is None]
    findings = found(reference, records)
    assert findings.difference is None
    assert findings.right == RIGHT[: len(WIDTHS)]
    assert findings.entered == ""


# --- values of the whole batch ---


def whole(rng):
    """A parameter that is tapped, between two taps of examples."""
    reference = drawn(rng)
    values, cotangents = rng.normal(size=(2, 3, 2))
    first, second, third = reference.passages()
    middle = passage("matrix", values, cotangents, axis=None)
    return reference, [first, second, middle, third], (values, cotangents)


def of_matrix(own, shares, factor=1.0):
    """Its records: one for each call, with a share of the cotangent each."""
    values, cotangents = own
    return [TapRecord("matrix", 0, values, None) for _ in shares] + [
        TapRecord("matrix", 0, values, factor * x * cotangents) for x in shares
    ]


def test_a_value_of_the_batch_has_the_sum_of_its_calls_cotangents(rng):
    """With the one factor that all examples have."""
    reference, passages, own = whole(rng)
    counted = np.ones(EXAMPLES, bool)
    for factor in (1.0, 4.0):
        records = reference.trained(factors=(factor,) * 3)
        right = records + of_matrix(own, (0.5, 0.3, 0.2), factor)
        findings = search(passages, right, counted)
        assert findings.difference is None
        assert "backward matrix" in findings.right
        lost = records + of_matrix(own, (0.5, 0.3), factor)
        difference = search(passages, lost, counted).difference
        assert (difference.direction, difference.tap) == ("backward", "matrix")
        assert difference.examples == ()
        assert difference.words.endswith("; it is 0.8 times the reference")
        assert "of example" not in difference.words
    # Calls with factors of their own have a sum that says nothing.
    records = reference.trained(factors=(1.0, 2.0, 1.0))
    findings = search(passages, records + of_matrix(own, (0.5, 0.3)), counted)
    assert findings.difference is None


def test_a_value_of_the_batch_that_differs_from_call_to_call_is_of_its_parts(rng):
    """Noted, and compared in neither direction; the same in all calls it is wrong."""
    reference, passages, (values, cotangents) = whole(rng)
    counted = np.ones(EXAMPLES, bool)
    parts = [values * x for x in (0.9, 1.2, 0.7)]
    of_parts = [TapRecord("matrix", 0, x, y) for x in parts for y in (None, cotangents)]
    findings = search(passages, reference.trained() + of_parts, counted)
    assert findings.difference is None
    assert findings.notes == [
        "matrix was not compared: it has no axis of examples, and the candidate "
        "computes it of parts of the batch"
    ]
    assert findings.of_parts == {2}
    assert not any("matrix" in x for x in findings.right)
    same = [TapRecord("matrix", 0, 0.9 * values, y) for y in (None, cotangents)] * 3
    difference = search(passages, reference.trained() + same, counted).difference
    assert (difference.tap, difference.examples) == ("matrix", ())
    assert difference.words.endswith("; it is 0.9 times the reference")


# --- what cannot be told apart, and what was not compared ---


def test_equal_examples_are_judged_by_the_direction_of_their_cotangents(reference):
    """Which of them is a copy cannot be told; another direction can."""
    for tap in WIDTHS:
        for numbers in (reference.values, reference.cotangents):
            numbers[tap][5] = numbers[tap][1]
    assert found(reference, reference.trained()).difference is None
    assert found(reference, reference.trained(((0, 1, 2), (3, 4), (6,)))).right == RIGHT

    def turned(cotangents, values):
        own = (values == reference.values["second"][1]).all(axis=1)
        cotangents[own] = cotangents[own][:, ::-1]
        return cotangents

    wrong = list(changed(reference.trained(), "second", True, turned))
    difference = found(reference, wrong).difference
    assert (difference.tap, difference.examples) == ("second", (1, 5))


def test_passages_of_one_tap_are_told_apart_by_their_values(rng):
    """A layer that is called twice: a difference names the call."""
    values, cotangents = rng.normal(size=(2, 2, EXAMPLES, 4))
    passages = [
        passage("layer", values[k], cotangents[k], f"layer[{k}]") for k in (0, 1)
    ]
    records = [TapRecord("layer", 0, values[k], None) for k in (0, 1)]
    back = [TapRecord("layer", 0, values[k], cotangents[k]) for k in (1, 0)]
    counted = np.ones(EXAMPLES, bool)
    labels = ["forward layer[0]", "forward layer[1]"]
    labels += ["backward layer[1]", "backward layer[0]"]
    assert search(passages, records + back, counted).right == labels
    for k in (0, 1):
        wrong = [*records]
        wrong[k] = wrong[k]._replace(value=values[k] + 2.0)
        assert search(passages, wrong, counted).difference.tap == f"layer[{k}]"
    double = back[1]._replace(cotangent=2 * cotangents[0])
    difference = search(passages, [*records, back[0], double], counted).difference
    assert (difference.direction, difference.tap) == ("backward", "layer[0]")


def test_taps_that_were_not_compared_are_noted(reference):
    """Those that the candidate lacks, those that the loss lacks, other shapes."""
    records = [x for x in reference.trained() if x.name != "second"]
    findings = found(reference, records)
    assert findings.notes == ["not reached by the candidate: second"]
    # It is not held against the candidate: the taps around it are right.
    assert findings.difference is None
    assert findings.right == [x for x in RIGHT if "second" not in x]
    records = [x for x in reference.trained() if x.name == "third"]
    assert found(reference, records).notes == [
        "not reached by the candidate: first, second"
    ]
    names = ("zeta", "eta", "third", "second")
    strange = [TapRecord(name, 0, np.ones((2, 9)), None) for name in names]
    assert found(reference, reference.trained() + strange).notes == [
        "eta is no tap in the loss",
        "zeta is no tap in the loss",
        "second was not compared where its shape is (2, 9)",
        "third was not compared where its shape is (2, 9)",
    ]
    assert found(reference, []).notes == [
        "no tap could be compared, so that none is known to be right",
        "the candidate has reached no tap: it is compiled ahead of time, or runs in "
        "another process. See `verify.TapRecording` and `verify.replay`",
    ]


# --- rows that are near to each other ---


def test_an_example_is_found_by_its_own_value_not_by_its_neighbours():
    """Numbers in steps of a bound are one class, of which one value is one example."""
    values = np.arange(EXAMPLES)[:, None] * BOUND
    reference = [passage("gate", values), passage("far", 1 + 9.0 * values / BOUND)]
    right = [
        TapRecord("gate", 0, values, None),
        TapRecord("far", 0, 1 + 9.0 * values / BOUND, None),
    ]
    assert search(reference, right, np.ones(EXAMPLES, bool)).difference is None
    same = [TapRecord("gate", 0, np.zeros_like(values), None), right[1]]
    difference = search(reference, same, np.ones(EXAMPLES, bool)).difference
    assert (difference.tap, difference.direction) == ("gate", "forward")
    assert difference.examples == (2, 3, 4, 5, 6)
    assert difference.ratio == pytest.approx(6)
    assert "of example 6" in difference.words


COMMON = {
    "a mask": ([1.0, 0, 1, 1, 0, 1, 0], BOUND),
    "weights": ([1.0, 0.5, 1, 2, 0.5, 3, 0.5], BOUND),
    "routes": ([3, 1, 3, 2, 1, 3, 1], 0.25),
    "only ones": ([1.0] * EXAMPLES, BOUND),
}


def with_common(reference, name, *, first=False):
    """The reference with a value that examples have in common."""
    values, bound = COMMON[name]
    rows_of = np.array(values).reshape(-1, 1)
    own = Passage(
        "common", "common", Layout((EXAMPLES,), 0, 1),
        Rows(rows_of, np.full(rows_of.shape, bound)), None,
    )  # fmt: skip
    passages = reference.passages()
    passages.insert(0 if first else 1, own)
    return rows_of[:, 0], passages


@pytest.mark.parametrize("parts", [PARTS, [(e,) for e in range(EXAMPLES)]])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", COMMON)
def test_what_examples_have_in_common_is_compared_in_their_order(
    reference, name, first, parts
):
    """In calls of several examples, and of one."""
    values, passages = with_common(reference, name, first=first)
    counted = np.ones(EXAMPLES, bool)

    def asked(own):
        records = reference.trained(parts, [1.0] * len(parts))
        records += [TapRecord("common", 0, own[list(part)], None) for part in parts]
        return search(passages, records, counted)

    right = asked(values)
    assert right.difference is None
    assert "forward common" in right.right
    for example in (1, 4, 5):
        wrong = values.copy()
        # Another example's value, which by itself is right.
        wrong[example] = values[example - 1] if name != "only ones" else 0
        wrong[example] += 0 if wrong[example] != values[example] else 1
        difference = asked(wrong).difference
        assert (difference.tap, difference.examples) == ("common", (example,))
        assert f"of example {example}" in difference.words
    swapped = values[[0, 1, 2, 4, 3, 5, 6]]
    # Calls of one example each might come in another order.
    if name != "only ones" and parts is PARTS:
        assert asked(swapped).difference.examples == (3, 4)


def test_whose_value_it_is_may_be_unknown(reference):
    """Where no other tap tells, nothing is said to be right."""
    values, passages = with_common(reference, "a mask")
    records = [TapRecord("common", 0, values, None)]
    found = search(passages, records, np.ones(EXAMPLES, bool))
    assert found.difference is None
    assert found.right == []
    assert any("common was not compared: examples have it" in x for x in found.notes)
    # What is no example's at all is wrong all the same.
    absent = [TapRecord("common", 0, np.ones(EXAMPLES), None)]
    found = search(passages, absent, np.ones(EXAMPLES, bool))
    assert (found.difference.tap, found.difference.examples) == ("common", (1, 4, 6))


@pytest.mark.parametrize("wrong", range(3))
def test_values_of_the_batch_are_in_the_order_of_the_program(rng, wrong):
    """One number cannot tell which passage it is, and XLA runs taps in any order."""
    values = [np.array(x) for x in (1.0, 2.0, 4.0)]
    reference = [passage("norm", x, axis=None, label=f"norm[{i}]")
                 for i, x in enumerate(values)]  # fmt: skip
    shown = [x * (1.25 if i >= wrong else 1) for i, x in enumerate(values)]
    records = [TapRecord("norm", 0, x, None, number=i) for i, x in enumerate(shown)]
    for _ in range(6):
        mixed = [records[i] for i in rng.permutation(3)]
        difference = search(reference, mixed, np.ones(EXAMPLES, bool)).difference
        assert difference.tap == f"norm[{wrong}]"
        assert f"got {1.25 * values[wrong]:.6g}" in difference.words


# --- scalar values behind others ---


def through_heads(rng):
    """A tap of examples before two scalar losses, which candidates do not show."""
    values, *parts = (rng.normal(size=(EXAMPLES, 4)) for _ in range(4))
    parts = dict(zip(("nll", "load loss", "z loss"), parts, strict=True))
    rest = rng.normal(size=(EXAMPLES, 1))
    passages = [
        dataclasses.replace(
            passage("router", values, sum(parts.values())),
            through={x: parts[x] for x in ("load loss", "z loss")},
        ),
        passage("token", rest, rest),
    ]

    def trained(factors, scale=1.0, noise=0.0):
        own = sum(f * x for f, x in zip(factors, parts.values(), strict=True))
        own = scale * (own + noise * rng.normal(size=own.shape))
        return [
            TapRecord("router", 0, values, None), TapRecord("token", 0, rest, None),
            TapRecord("token", 0, rest, scale * rest),
            TapRecord("router", 0, values, own),
        ]  # fmt: skip

    return passages, trained


@pytest.mark.parametrize("scale", [1.0, -3.0])
@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((1, 0.5, 1), "its part through load loss is 0.5 times the reference"),
        ((1, 1, 3), "its part through z loss is 3 times the reference"),
        ((1, 0, 1), "its part through load loss is absent"),
        ((1, 2, 0), "its part through load loss is 2 times the reference and "
                    "its part through z loss is absent"),
    ],
)  # fmt: skip
def test_the_loss_that_counts_wrongly_is_named(rng, scale, factors, words):
    """Whatever the trainer's own factor of all of them is."""
    passages, trained = through_heads(rng)
    difference = search(passages, trained(factors, scale), np.ones(EXAMPLES, bool))
    assert difference.difference.tap == "router"
    assert difference.difference.words.endswith(f"; {words}")


@pytest.mark.parametrize("scale", [1.0, -3.0])
def test_a_loss_counts_in_units_of_the_rest_where_no_later_tap_has_a_factor(rng, scale):
    """The examples' factor is then unknown; with a later tap it is not."""
    passages, trained = through_heads(rng)
    every = np.ones(EXAMPLES, bool)
    records = [r for r in trained((2, 6, 2), scale) if r.name == "router"]
    words = search(passages[:1], records, every).difference.words
    assert words.endswith("; its part through load loss is 3 times the reference")
    right = [r for r in trained((2, 2, 2), scale) if r.name == "router"]
    assert search(passages[:1], right, every).difference is None
    words = search(passages, trained((1.5, 1, 1), scale), every).difference.words
    assert "through" not in words


@pytest.mark.parametrize("factors", [(1, 1, 1), (1.5, 1, 1), (1, 0.5, 1)])
def test_no_loss_is_blamed_for_another_mistake(rng, factors):
    passages, trained = through_heads(rng)
    records = trained(factors, noise=0.0 if factors == (1, 1, 1) else 0.3)
    found = search(passages, records, np.ones(EXAMPLES, bool))
    if factors == (1, 1, 1):
        assert found.difference is None
    else:
        assert "through" not in found.difference.words


# --- a number for each part of the batch ---


def of_parts(rng, parts=3):
    """A loss of each of several parts, behind a value of examples."""
    values, loads = rng.normal(size=(EXAMPLES, 4)), rng.normal(size=(parts, 1))
    slopes = rng.normal(size=(EXAMPLES, 4))
    flowing = np.full((parts, 1), 0.1 / parts)
    load = Passage("load", "load", Layout((), None, 1), rows(loads), rows(flowing))
    passages = [load, passage("token", values, slopes)]

    def trained(share=1.0, factors=(1.0,) * parts, lost=()):
        own = [TapRecord("load", 0, x * f, None)
               for x, f in zip(loads[:, 0], factors, strict=True)]  # fmt: skip
        back = [TapRecord("load", 0, loads[i, 0], np.array(share * 0.1 / parts))
                for i in range(parts) if i not in lost]  # fmt: skip
        tokens = [TapRecord("token", 0, values, x) for x in (None, slopes)]
        return [*own, *tokens, *back]

    return passages, trained


def test_a_number_of_each_part_is_found_in_any_call(rng):
    passages, trained = of_parts(rng)
    found = search(passages, trained(), np.ones(EXAMPLES, bool))
    assert found.difference is None
    assert found.right == [
        "forward load", "forward token", "backward token", "backward load"
    ]  # fmt: skip
    batched = [r for r in trained() if r.name == "token"]
    batched += [
        TapRecord("load", 1, passages[0].forward.values[:, 0], None),
        TapRecord(
            "load",
            1,
            *(x.values[:, 0] for x in (passages[0].forward, passages[0].backward)),
        ),
    ]
    assert search(passages, batched, np.ones(EXAMPLES, bool)).right == found.right


@pytest.mark.parametrize(
    ("change", "direction", "words"),
    [
        ({"share": 3.0}, "backward", "it is 3 times the reference"),
        ({"share": 0.25}, "backward", "it is 0.25 times the reference"),
        ({"lost": (0, 1, 2)}, "backward", "no cotangent arrives"),
        ({"lost": (1,)}, "backward", "no cotangent arrives"),
        ({"factors": (1.0, 1.0, 1.5)}, "forward", "expected"),
    ],
)
def test_a_wrong_number_of_parts_is_named(rng, change, direction, words):
    passages, trained = of_parts(rng)
    difference = search(passages, trained(**change), np.ones(EXAMPLES, bool)).difference
    assert (difference.direction, difference.tap) == (direction, "load")
    assert words in difference.words


def test_a_number_of_smaller_parts_is_not_compared(rng):
    """A trainer of more micro-batches than the reference has parts."""
    passages, trained = of_parts(rng)
    more = [TapRecord("load", 0, np.array(x), None) for x in rng.normal(size=5)]
    tokens = [r for r in trained() if r.name == "token"]
    found = search(passages, [*more, *tokens], np.ones(EXAMPLES, bool))
    assert found.difference is None
    assert any("computes it of parts of the batch" in note for note in found.notes)
