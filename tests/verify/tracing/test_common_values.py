"""Values that many examples have in common: masks, weights, labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify

EXAMPLES, WIDTH = 11, 5
PARTS = (slice(0, 4), slice(4, 8), slice(8, 11))
MASK = np.array([1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1])
KINDS = {
    "float": MASK.astype(np.float32),
    "column": MASK.astype(np.float32)[:, None],
    "bool": MASK.astype(bool),
    "int": MASK.astype(np.int32),
    "weights": np.where(MASK, 2.5, 0.5).astype(np.float32),
    "all ones": np.ones(EXAMPLES, np.float32),
}


def losses(w, batch, first=False):
    """Squared errors of the examples that a mask keeps; it may be the first tap."""
    x, mask = batch
    mask = verify.tap(mask, "mask") if first else mask
    hidden = verify.tap(jnp.tanh(x @ w["in"]), "hidden")
    mask = mask if first else verify.tap(mask, "mask")
    kept = mask.reshape(-1).astype(x.dtype)
    return (verify.tap(hidden @ w["out"], "score") - 1) ** 2 * kept


def micro(turned=(), parts=PARTS, **options):
    """Micro-batches, in another order; some examples have another mask."""

    def loss(w, batch):
        return losses(w, batch, **options).sum() / EXAMPLES

    part = jax.jit(jax.value_and_grad(loss))

    def run(w, batch):
        x, mask = batch
        other = ~mask if mask.dtype == bool else mask.max() - mask + mask.min()
        # Of a mask of ones the other one is 0.
        other = jnp.where(mask.max() == mask.min(), jnp.zeros_like(mask), other)
        own = jnp.isin(jnp.arange(EXAMPLES), jnp.array(turned, int))
        mask = jnp.where(own.reshape(-1, *[1] * (mask.ndim - 1)), other, mask)
        found = [part(w, (x[s], mask[s])) for s in (*parts[1:], parts[0])]
        return jax.tree.map(lambda *leaves: sum(leaves), *found)

    return run


def problem(rng):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"in": normal(WIDTH, 7), "out": normal(7)}, normal(EXAMPLES, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_mask_is_named_with_its_examples(kind, rng):
    """Though each of its values is another example's right one."""
    w, x = problem(rng)
    batch = x, jnp.asarray(KINDS[kind])
    judge = verify.trace_judge(losses, w, batch, finite_differences=False)
    right = judge(micro())
    assert right.ok, str(right)
    assert "forward mask" in right.right
    assert not right.notes
    for turned in ((5,), (2, 9)):
        found = judge(micro(turned))
        assert found.report.failures, str(found)
        difference = found.difference
        assert (difference.direction, difference.tap) == ("forward", "mask"), str(found)
        assert difference.examples == turned


def test_of_a_mask_before_all_others_a_later_tap_tells_whose_it_is(rng):
    w, x = problem(rng)
    batch = x, jnp.asarray(KINDS["float"])

    def own(w, batch):
        return losses(w, batch, first=True)

    judge = verify.trace_judge(own, w, batch, finite_differences=False)
    each = [slice(e, e + 1) for e in range(EXAMPLES)]
    for parts in (PARTS, [slice(0, EXAMPLES)], each):
        right = judge(micro(parts=parts, first=True))
        assert right.ok, str(right)
        assert "forward mask" in right.right
        found = judge(micro((6,), parts, first=True))
        assert (found.difference.tap, found.difference.examples) == ("mask", (6,))


def test_a_mask_alone_is_not_said_to_be_right(rng):
    w, x = problem(rng)
    batch = x, jnp.asarray(KINDS["float"])

    def own(w, batch):
        x, mask = batch
        return (x @ w["in"]).sum(-1) ** 2 * verify.tap(mask, "mask")

    judge = verify.trace_judge(own, w, batch, finite_differences=False)

    def whole(w, batch):
        return jax.value_and_grad(lambda w: own(w, batch).mean())(w)

    def rolled(w, batch):
        return whole(w, (batch[0], jnp.roll(batch[1], 1)))

    for candidate in (whole, rolled):
        found = judge(candidate)
        assert "forward mask" not in found.right
        assert any("mask was not compared" in note for note in found.notes)
    assert found.report.failures
