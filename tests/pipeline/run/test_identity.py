"""What workers compare before they work together, and how they say what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.pipeline.run import identity
from jdist.pipeline.run.identity import SAMPLE, CallArguments, CallIdentity
from jdist.pipeline.run.micro_batch import split_batch


def identity_of(batch, weights=None, count=3, key=None):
    parts = split_batch(batch, weights, count, "mean")
    given = CallArguments(5, {}, batch, parts, key)
    return identity.identity_of("train_step", given)


def batch_of(rng, examples=7, **others):
    rows = {"x": (examples, 3), "image": (examples, 40, 11)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in rows.items()} | others


def test_what_is_the_same_passes(rng):
    """Whatever holds the arrays, and also with entries that the other has not."""
    batch = batch_of(rng)
    mine = identity_of(batch)
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    turned = {name: np.asarray(x, order="F") for name, x in batch.items()}
    for other in (batch, arrays, turned, {"x": batch["x"]}):
        mine.check("worker0", identity_of(other), "worker1")
    mine.check("worker0", CallIdentity(*mine.plain()), "worker1")


def test_every_element_of_a_small_array_counts(rng):
    batch = batch_of(rng)
    mine = identity_of(batch)
    for index in np.ndindex(batch["x"].shape):
        other = batch["x"].copy()
        other[index] += 1e-6
        assert identity_of(batch | {"x": other}).checksums != mine.checksums


@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
def test_a_large_array_is_sampled_all_over(rng, made):
    """Also one with empty borders, in which a regular sample might lie."""
    images = np.zeros((64, 28, 28), np.float32)
    assert images.size > 8 * SAMPLE
    images[:, 4:-4, 4:-4] = rng.normal(size=(64, 20, 20))
    found = {
        tuple(identity_of({"x": made(x)}).checksums.values())
        for x in (images, images[::-1], np.roll(images, 1, axis=2), images * 1.0001)
    }
    assert len(found) == 4


def test_what_has_no_bytes_of_its_own_is_left_out(rng):
    names = np.array([f"image {i}" for i in range(7)], dtype=object)
    found = identity_of(batch_of(rng, name=names, text=names.astype(str)))
    assert set(found.checksums) == {
        "entry 'x'", "entry 'image'", "entry 'text'", "weights"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kind": "evaluate"},
            r"`train_step` must be called by all workers alike\. Got train_step of "
            r"step 5 with 7 examples in 3 micro-batches on 'worker0', evaluate of step",
        ),
        ({"step": 6}, r"train_step of step 6 with 7 examples .* on 'worker1'"),
        ({"step": None}, r", train_step with 7 examples .* on 'worker1'"),
        ({"examples": 8}, r"with 8 examples in 3 micro-batches on 'worker1'"),
        ({"micro_batches": 4}, r"with 7 examples in 4 micro-batches on 'worker1'"),
        ({"settings": {"lr": "0.5"}}, r"micro-batches \(lr=0\.5\) on 'worker1'"),
    ],
)
def test_another_call_is_named(rng, change, message):
    mine = identity_of(batch_of(rng))
    with pytest.raises(ValueError, match=message):
        mine.check("worker0", mine._replace(**change), "worker1")


@pytest.mark.parametrize("what", ["entry 'x'", "weights", "key"])
def test_other_data_is_named(rng, what):
    batch, weights = batch_of(rng), np.arange(1.0, 8)
    mine = identity_of(batch, weights, key=jax.random.key(3))
    others = {
        "entry 'x'": identity_of(batch | {"x": batch["x"] + 1}, weights),
        "weights": identity_of(batch, weights[::-1].copy()),
        "key": identity_of(batch, weights, key=jax.random.key(4)),
    }
    message = rf"same batch, weights and key .* Got another {what} on 'worker0' than"
    with pytest.raises(ValueError, match=message):
        mine.check("worker0", others[what], "worker1")
