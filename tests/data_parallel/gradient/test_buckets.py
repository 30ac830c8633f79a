"""Buckets: torch's rule for who travels with whom, and one collective for each."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import verify
from jdist.data_parallel import assign_buckets, shard_batch, value_and_grad
from jdist.data_parallel.gradient.buckets import plan_buckets
from tests.replicas import over

KIB, MIB = 2**10, 2**20


def shapes(*kibibytes, dtype="float32"):
    """Leaves of so many KiB, float32."""
    return [jax.ShapeDtypeStruct((256 * k,), dtype) for k in kibibytes]


def test_a_bucket_closes_at_its_limit_or_above():
    """The last leaf may overshoot; the second limit serves all later buckets."""
    leaves = shapes(3, 1, 4, 1, 5, 9, 2, 6)
    limits = [4 * KIB, 6 * KIB]
    assert assign_buckets(leaves, limits) == [[0, 1], [2, 3, 4], [5], [6, 7]]


def test_each_dtype_walks_the_limits_by_itself():
    """Buckets of both kinds grow side by side, and are ordered by their first leaf."""
    single, double = shapes(2, 2, 2, 2), shapes(1, 1, 1, 1, dtype="float64")
    leaves = [leaf for pair in zip(double, single, strict=True) for leaf in pair]
    found = assign_buckets(leaves, [2 * KIB, 4 * KIB])
    # float64: 2 KiB each, as the float32 leaves.
    assert found == [[0], [1], [2, 4], [3, 5], [6], [7]]


def test_each_device_has_its_own(mesh):
    """Arrays on different devices are never in one bucket."""
    devices = mesh(2).devices
    leaves = [jax.device_put(jnp.zeros(4), devices[i]) for i in (0, 1, 0, 1, 1)]
    assert assign_buckets(leaves, [10**6]) == [[0, 2], [1, 3, 4]]


def test_a_limit_of_zero_separates_and_an_infinite_one_does_not():
    """Also with leaves of no elements."""
    leaves = shapes(1, 0, 2)
    assert assign_buckets(leaves, [0]) == [[0], [1], [2]]
    assert assign_buckets(leaves, [np.inf]) == [[0, 1, 2]]
    assert assign_buckets([], [1]) == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([], r"assign_buckets\(limits=...\)` must have at least one limit. Got \(\)"),
        ([4, -1], "must be at least 0 each. Got -1"),
        ([float("nan")], "must be at least 0 each. Got nan"),
    ],
)
def test_wrong_limits_are_refused(limits, message):
    """Before anything is assigned."""
    with pytest.raises(ValueError, match=message):
        assign_buckets(shapes(1), limits)


def plan(kibibytes, ready, cap=None):
    """The plan for float32 leaves named by letters."""
    found = plan_buckets(shapes(*kibibytes), ready, cap)
    return ["".join(chr(ord("a") + i) for i in bucket) for bucket in found]


def test_the_default_is_1_then_25_mib_in_the_order_of_readiness():
    """Large leaves go alone, each when it is ready."""
    sizes = [600, 500, 700, 30 * KIB, 300, 2 * KIB, 900]
    assert plan(sizes, [6, 5, 4, 3, 2, 1, 0]) == ["f", "ge", "d", "cba"]


def test_a_given_cap_is_the_only_limit():
    """No first bucket of 1 MiB, and large leaves travel with small ones."""
    sizes = [600, 500, 700, 30 * KIB, 300, 2 * KIB, 900]
    assert plan(sizes, range(7), cap=2) == ["abcd", "ef", "g"]
    assert plan(sizes, range(7), cap=(0.5, 25)) == ["a", "bcd", "efg"]


KINDS = st.sampled_from(["float32", "float64", "complex64"])
LEAVES = st.lists(
    st.tuples(st.integers(0, 2000), KINDS, st.integers(-1, 5)), min_size=1, max_size=30
)


@settings(max_examples=200, deadline=None)
@given(LEAVES, st.sampled_from([None, 0, 0.5, (0.1, 1, 25)]))
def test_every_plan_is_a_partition_in_the_order_of_readiness(leaves, cap):
    """Each leaf once, one dtype in a bucket, none leaves before its last leaf is there;
    and a given cap is `assign_buckets` in that order."""
    found = [
        jax.ShapeDtypeStruct((256 * size,), jnp.dtype(kind)) for size, kind, _ in leaves
    ]
    ready = [when for *_, when in leaves]
    buckets = plan_buckets(found, ready, cap)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(found)))
    assert all(len({found[i].dtype for i in bucket}) == 1 for bucket in buckets)
    last = [max(ready[i] for i in bucket) for bucket in buckets]
    assert last == sorted(last)
    if cap is None:
        large = [
            b for b in buckets if found[b[0]].size * found[b[0]].dtype.itemsize >= MIB
        ]
        assert all(len(bucket) == 1 for bucket in large)
        return
    order = sorted(range(len(found)), key=lambda i: (ready[i], i))
    limits = [MIB * x for x in (cap if isinstance(cap, tuple) else (cap,))]
    assigned = assign_buckets([found[i] for i in order], limits)
    assert sorted(buckets) == sorted([order[i] for i in bucket] for bucket in assigned)


# --- in the compiled program ---


def losses_of(params, batch):
    """A chain of layers, the last one used twice, and a parameter that is not used."""
    hidden = batch
    for layer in params["layers"]:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"][None])
    return ((hidden @ layer["w"] - batch) ** 2).sum(axis=1)


@pytest.fixture
def problem(rng):
    """Three layers of 6 x 6 in float64: 288 and 48 bytes."""
    layers = [
        {
            "w": jnp.asarray(rng.normal(size=(6, 6))),
            "b": jnp.asarray(rng.normal(size=6)),
        }
        for _ in range(3)
    ]
    params = {"layers": layers, "unused": jnp.asarray(rng.normal(size=4))}
    return params, rng.normal(size=(7, 6)), rng.uniform(0.5, 2, size=7)


@cache
def judge():
    """Compiled once."""
    return verify.gradients_judge(losses_of)


def collectives(fn, *arguments):
    """How many collectives the compiled program has."""
    text = jax.jit(fn).lower(*arguments).compile().as_text()
    return len(re.findall(r" all-(?:reduce|gather)(?:-start)?\(", text))


@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
@pytest.mark.parametrize(
    ("cap", "count"),
    [(None, 1), (300 / MIB, 3), ((1 / MIB, 300 / MIB), 4), (0, 7)],
)
def test_one_collective_for_each_bucket(problem, mesh, method, cap, count):
    """Counted after XLA's passes, which would merge them; and the gradient is right.

    One more is for the total of the weights, before all others.
    """
    params, batch, weights = problem
    devices = mesh(3)
    fn = value_and_grad(losses_of, **over(devices), method=method, bucket_cap_mb=cap)
    shards = shard_batch(batch, **over(devices), sizes=(4, 0, 3), weights=weights)
    assert collectives(fn, params, *shards) == count + 1
    candidates = {"buckets": lambda p, b: fn(p, *shards)}
    report = judge()(
        params, batch, candidates, weights=weights, finite_differences=False
    )
    report.raise_if_failed()
