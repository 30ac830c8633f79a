"""The derivation's worked example: by hand, on one device, on K, over all splits.

    f(x) = mean((x W)^3),  W = (0.3, 0.4)^T

For an example x with y = x W = 0.3 x_1 + 0.4 x_2,

    l(x) = y^3,    dl/dW = 3 y^2 x^T

and with the batch D = ((1, 2), (3, 4), (5, 6), (7, 8)):

    x       y      y^3         3 y^2       3 y^2 x^T
    1 2     1.1      1.331       3.63      (  3.63,    7.26)
    3 4     2.5     15.625      18.75      ( 56.25,   75.00)
    5 6     3.9     59.319      45.63      (228.15,  273.78)
    7 8     5.3    148.877      84.27      (589.89,  674.16)

    L = 225.152 / 4 = 56.288        dL/dW = (877.92, 1030.20) / 4 = (219.48, 257.55)

Split into D_1 .. D_K of B_1 .. B_K examples, dL/dW = sum_i (B_i / 4) dL_i/dW. The mean
of the means over D_1 = {x_1}, D_2 = {x_2, x_3, x_4} would be (147.53, 174.12) instead.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.data_parallel import shard_batch, value_and_grad
from tests.replicas import over

W = np.array([0.3, 0.4])
D = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
LOSS, GRADIENT = 56.288, np.array([219.48, 257.55])
# The decimals above are rounded to float64 in D, W and the table: a handful of terms.
BY_HAND = {"terms": 4, "scale": (LOSS, GRADIENT)}


def losses(w, x):
    """(x W)^3 of each example."""
    return (x @ w) ** 3


def splits(count):
    """All ways to cut a sequence of examples into K = 1..4 parts, empty ones too."""
    for replicas in range(1, 5):
        for cuts in itertools.combinations_with_replacement(
            range(count + 1), replicas - 1
        ):
            edges = (0, *cuts, count)
            yield tuple(b - a for a, b in itertools.pairwise(edges))


def test_the_table_by_hand():
    """The numbers above, with a pencil's arithmetic: 3 y^2 x, added and divided."""
    y = [0.3 * a + 0.4 * b for a, b in D.tolist()]
    gradient = [
        sum(3 * t * t * x[i] for t, x in zip(y, D, strict=True)) for i in (0, 1)
    ]
    found = (np.float64(sum(t**3 for t in y) / 4), np.array(gradient) / 4)
    verify.compare((np.float64(LOSS), GRADIENT), found, **BY_HAND).raise_if_failed()


def test_by_one_device():
    """`jax.value_and_grad` of the mean."""
    loss, gradient = jax.value_and_grad(lambda w: losses(w, D).mean())(jnp.asarray(W))
    expected = (np.float64(LOSS), GRADIENT)
    verify.compare(expected, (loss, gradient), **BY_HAND).raise_if_failed()


@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_by_k_devices_over_all_ways_to_split(mesh, replicas, method):
    """1 + 5 + 15 + 35 splits, on K devices and on one; every one gives the table."""
    expected = (np.float64(LOSS), GRADIENT)
    mine = [sizes for sizes in splits(4) if len(sizes) == replicas]
    assert len(mine) == {1: 1, 2: 5, 3: 15, 4: 35}[replicas]
    for where in (mesh(replicas), replicas):
        fn = value_and_grad(losses, **over(where), method=method)
        for sizes in mine:
            found = fn(jnp.asarray(W), *shard_batch(D, **over(where), sizes=sizes))
            verify.compare(expected, found, **BY_HAND).raise_if_failed()


def test_the_mean_of_means_is_another_number():
    """Unless all shards are equal; the judge says which leaf and by how much."""

    def mean_of_means(w, x):
        parts = [
            jax.value_and_grad(lambda w, x=part: losses(w, x).mean())(w)
            for part in (x[:1], x[1:])
        ]
        return jax.tree.map(lambda a, b: (a + b) / 2, *parts)

    wrong = mean_of_means(jnp.asarray(W), D)
    np.testing.assert_allclose(wrong[1], [147.53, 174.12], rtol=1e-12)
    report = verify.gradients(
        losses, jnp.asarray(W), D, {"mean of means": mean_of_means}
    )
    assert [leaf.path for leaf in report.failures] == ["(loss)", "(root)"]
