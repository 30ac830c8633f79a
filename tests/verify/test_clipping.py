"""A clip of parts is found by its norm, from its result alone."""

import numpy as np
import pytest

from jdist.verify.steps.clipping import ClippedPart, clipped_in_parts, norm_of_clip
from jdist.verify.steps.trajectory import InParts, Moment

SHAPES = {"gradient/a": (5,), "gradient/b": (3, 7), "gradient/c": ()}


def leaves(rng, size=1.0, kind=float):
    return {
        path: size * np.asarray(rng.normal(size=shape), kind)
        for path, shape in SHAPES.items()
    }


def norm_of(tree):
    return np.sqrt(sum((np.abs(x) ** 2).sum() for x in tree.values()))


def clipped(tree, norm):
    factor = min(1, norm / norm_of(tree))
    return {path: factor * x for path, x in tree.items()}


def summed(trees, shares):
    return {
        path: sum(s * x[path] for s, x in zip(shares, trees, strict=True))
        for path in SHAPES
    }


@pytest.mark.parametrize("norm", [0.1, 1.7, 4.4, 9.0])
def test_the_norm_is_found_between_any_two_norms(rng, norm):
    """Of parts that are clipped and parts that are not."""
    rows = [rng.normal(size=11) * size for size in (1.0, 0.4, 2.0, 3.0, 0.0)]
    shares = rng.uniform(0.1, 1, size=5)
    norms = [float(np.linalg.norm(row)) for row in rows]
    parts = [
        ClippedPart(n, s * row) for n, s, row in zip(norms, shares, rows, strict=True)
    ]
    found = sum(
        s * row * min(1, norm / n if n else 1)
        for n, s, row in zip(norms, shares, rows, strict=True)
    )
    told, rest = norm_of_clip(found, parts)
    assert told == pytest.approx(norm, rel=1e-9)
    assert rest < 1e-9


def moment(whole, *divisions):
    return Moment({}, whole, {}, {}, {}, in_parts=lambda: divisions)


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_parts_of_unequal_weight_are_told_by_their_number(rng, kind, count):
    """Among other numbers of parts; the whole may be clipped itself."""
    trees = [leaves(rng, 9.5 + i, kind) for i in range(count)]
    shares = rng.dirichlet(np.ones(count))
    whole = summed(trees, shares)
    others = [leaves(rng, kind=kind) for _ in range(5)]
    wrong = InParts(5, [0.2] * 5, others)
    right = InParts(count, shares, trees)
    found = summed([clipped(tree, 1.25) for tree in trees], shares)
    for wanted in (whole, clipped(whole, 1.25)):
        words = clipped_in_parts(found, wanted, moment(whole, wrong, right))
        assert (
            f"each of {count} equal parts of the batch were clipped to norm 1.25 "
            in words
        )
        assert clipped_in_parts(found, wanted, moment(whole, wrong)) == ""


def test_each_leaf_by_its_own_norm(rng):
    whole = leaves(rng, 2.0)
    found = {path: clipped({path: x}, 0.75)[path] for path, x in whole.items()}
    words = clipped_in_parts(found, clipped(whole, 0.75), moment(whole))
    assert words.startswith("as if each leaf were clipped to norm 0.75 by its own norm")


def test_what_is_no_clip_is_not_called_one(rng):
    """A factor, another gradient, a part that is lost, a sum of larger parts."""
    trees = [leaves(rng, 1.0 + i) for i in range(3)]
    whole = summed(trees, [1 / 3] * 3)
    known = moment(whole, InParts(3, [1 / 3] * 3, trees))
    wrong = {
        "factor": {path: 0.5 * x for path, x in whole.items()},
        "equal": whole,
        "another": leaves(rng),
        "lost": summed(trees[:2], [1 / 3] * 2),
        "doubled": summed([*trees, trees[0]], [1 / 3] * 4),
        "largest leaf": whole | {"gradient/b": 0.75 * whole["gradient/b"]},
        "last part": summed(trees, [1 / 3, 1 / 3, 0.3]),
        "one leaf": whole | {"gradient/a": 2 * whole["gradient/a"]},
        "not finite": whole | {"gradient/a": np.full(5, np.nan)},
    }
    for name, found in wrong.items():
        assert clipped_in_parts(found, whole, known) == "", name
