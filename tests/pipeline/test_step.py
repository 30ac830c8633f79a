"""The loop that starts actions: what it does when a value comes at an odd moment."""

import jax
import numpy as np

from jdist import pipeline
from jdist.pipeline.post import InProcessPost
from tests.pipeline.models import losses, problem, stages


def test_a_value_that_comes_between_two_looks(monkeypatch):
    """It is not waited for: nothing else may ever come that would end the wait."""
    schedule = pipeline.one_f_one_b(3, 4)
    pipe = pipeline.Pipeline(stages(), losses, schedule)
    params, batch, weights = problem(7)
    expected = pipe.value_and_grad(params, batch, weights)
    seen, look = set(), InProcessPost.has

    def late(post, parcel, worker):
        """The first look does not find it."""
        there = look(post, parcel, worker)
        if there and parcel.kind in "FB" and parcel not in seen:
            seen.add(parcel)
            return False
        return there

    monkeypatch.setattr(InProcessPost, "has", late)
    found = pipe.value_and_grad(params, batch, weights)
    assert len(seen) >= 2 * 2 * 4  # both boundaries, both ways, four micro-batches
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)
