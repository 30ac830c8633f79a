"""Findings of several processes about a leaf: one row, the same wherever it is made."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from jdist.verify.processes.finding import Finding, Products, merged, restored, worst_of
from jdist.verify.processes.shards import replicas_differ
from jdist.verify.report import LeafReport

ROW = LeafReport("mine", "w", "float32", (4, 3), 1e-8, 1e-7, 2.0, 0.125, 1.0)


def row(**changes):
    return dataclasses.replace(ROW, **changes)


def test_each_number_is_the_largest_of_any_part():
    """And the words are those of the part that fails, whatever its numbers are."""
    parts = [
        row(max_abs=3.0, ratio=0.5),
        row(max_rel=4.0, ratio=0.1, problem="off"),
        row(max_ulp=9.0, ratio=0.9),
    ]
    for order in itertools.permutations(parts):
        found = worst_of(order)
        assert (found.max_abs, found.max_rel, found.max_ulp) == (3.0, 4.0, 9.0)
        assert found.problem == "off"


def test_nan_is_the_worst_number():
    """A shard with NaN is not hidden by one that is merely far off."""
    parts = [row(ratio=math.nan, problem="not finite"), row(ratio=1e9, problem="off")]
    for order in (parts, parts[::-1]):
        assert worst_of(order).problem == "not finite"
        assert math.isnan(worst_of(order).ratio)


@pytest.mark.parametrize("number", ["max_abs", "max_rel", "max_ulp"])
def test_a_number_that_is_nan_in_one_part_is_nan_in_the_whole(number):
    """In whatever order the parts come; Python's `max` would keep the first."""
    parts = [row(**{number: x}) for x in (5.0, math.nan, math.inf)]
    for order in itertools.permutations(parts):
        assert math.isnan(getattr(worst_of(order), number))


def test_what_one_part_cannot_judge_is_not_judged():
    """Also where another part is equal."""
    parts = [row(), row(unjudged="zero would pass too")]
    assert worst_of(parts).unjudged == "zero would pass too"


def test_the_processes_that_fail_are_named():
    """Unless all do."""
    good, bad = Finding(row()), Finding(row(problem="off by 9"))
    assert merged({0: good, 1: good}, 2).problem == ""
    assert merged({0: good, 1: bad, 2: bad}, 3).problem == "on process 1, 2: off by 9"
    assert merged({0: bad, 1: bad}, 2).problem == "off by 9"


def test_the_angle_is_that_of_the_whole(rng):
    """From sums over the parts; a process without a part adds nothing."""
    a, b = rng.normal(size=(2, 12))
    parts = [
        Products(*(float(x[s] @ y[s]) for x, y in ((a, b), (a, a), (b, b))))
        for s in (slice(0, 5), slice(5, 12), slice(0, 0))
    ]
    found = merged({r: Finding(row(), p) for r, p in enumerate(parts)}, 3)
    wanted = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    np.testing.assert_allclose(found.cosine, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("products", "cosine"),
    [
        (Products(), 1.0),
        (Products(0.0, 2.0, 0.0), 0.0),
        (Products(0.0, 0.0, 2.0), 0.0),
        (Products(-2.0, 2.0, 2.0), -1.0),
        (Products(2.0000001, 2.0, 2.0), 1.0),
    ],
)
def test_the_angle_at_the_ends(products, cosine):
    """Both zero: the same direction; rounding does not lead beyond 1."""
    assert products.cosine <= 1
    np.testing.assert_allclose(products.cosine, cosine, rtol=1e-15)


def test_a_row_without_numbers_has_no_angle():
    """Of a leaf that is missing nothing was multiplied."""
    missing = LeafReport("mine", "w", "None", (), problem="missing")
    assert math.isnan(merged({0: Finding(missing)}, 1).cosine)


def test_replicas_are_compared_between_processes():
    """Equal bits within each are not enough."""
    device = [[{"device": f"TPU_{i}"}] for i in range(4)]
    here = {"[0:2, :]": {"aa": device[0]}, "[2:4, :]": {"bb": device[1]}}
    there = {"[0:2, :]": {"aa": device[2]}, "[2:4, :]": {"cc": device[3]}}
    words = "replicas differ at [2:4, :]: TPU_1 other than TPU_3"
    assert replicas_differ([here, there]) == words
    assert replicas_differ([here]) == ""
    found = merged(
        {r: Finding(row(), replicas=x) for r, x in enumerate((here, there))}, 2
    )
    assert found.problem == words
    both = merged({0: Finding(row(problem="off"), replicas=here),
                   1: Finding(row(), replicas=there)}, 2)  # fmt: skip
    assert both.problem == f"{words}; on process 0: off"


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ("aabb", "over dp at [:]: dp=0 other than dp=1"),
        ("abab", "over tp at [:]: tp=0 other than tp=1"),
        ("abaa", "over dp, tp at [:]: dp=0 tp=0, dp=1 tp=0, dp=1 tp=1 other than "
                 "dp=0 tp=1"),
        ("abba", "over dp, tp at [:]: dp=0 tp=0, dp=1 tp=1 other than dp=0 tp=1, "
                 "dp=1 tp=0"),
    ],
)  # fmt: skip
def test_the_axes_are_named_over_which_replicas_differ(bits, words):
    """Of two axes of two devices each, from two processes."""
    parts = [{"[:]": {}}, {"[:]": {}}]
    for i, digest in enumerate(bits):
        place = {"dp": i // 2, "tp": i % 2}
        parts[i // 2]["[:]"].setdefault(digest, []).append(place)
    assert replicas_differ(parts) == f"replicas differ {words}"


def test_findings_travel_as_json():
    """Shapes, NaN and digests come back as they were."""
    for finding in (
        Finding(row(), Products(1.0, 2.0, 3.0), {"[:]": {"aa": ["TPU_0", "TPU_1"]}}),
        Finding(row(ratio=math.inf, shape=(), problem="off", unjudged="no")),
    ):
        assert restored(json.loads(json.dumps(dataclasses.asdict(finding)))) == finding
    unknown = dataclasses.asdict(Finding(row(ratio=math.nan)))
    lost = restored(json.loads(json.dumps(unknown)))
    assert math.isnan(lost.row.ratio)
