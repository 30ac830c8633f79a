"""Jobs, the largest batch and the smallest slice, on hardware made up for it."""

import jax
import jax.numpy as jnp
import pytest

from jdist import targets
from jdist._own_code import OwnCodeRaised
from jdist.targets import job as jobs
from jdist.targets import search


def hardware(memory, chips=1):
    chip = targets.Chip("here", "cpu", memory, 1e10, {"float32": 1e11})
    return targets.Hardware(chip, (chips,))


def doubled(hardware, batch=8):
    """Needs 128 bytes an example, half for the argument and half for the result."""
    x = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    return lambda x: x * 2, x


def test_the_largest_batch():
    """All that is smaller fits, all that is larger by the tolerance does not."""
    found = targets.largest_batch(doubled, hardware(1_000_000))
    assert found.best.fits
    exact = targets.largest_batch(doubled, hardware(1_000_000), tolerance=0).best.batch
    # Of the 7812 that the arrays alone would allow, some memory is the program's.
    assert 7700 < exact <= 1_000_000 // 128
    assert exact / 1.05 <= found.best.batch <= exact
    assert len(found.tried) < 10
    limits = [each.batch for each in found.tried if not each.fits]
    assert min(limits) > exact


def test_batches_are_multiples():
    """Of the number of chips, or of what is asked for."""
    seen = []
    found = targets.largest_batch(
        doubled, hardware(100_000), multiple=48, on_candidate=seen.append
    )
    assert tuple(seen) == found.tried
    assert all(each.batch % 48 == 0 for each in seen)
    assert found.best.batch == max(each.batch for each in seen if each.fits)


def test_no_batch_fits():
    found = targets.largest_batch(doubled, hardware(100))
    assert found.best is None
    assert [each.batch for each in found.tried] == [1]


def test_memory_that_jumps_is_bisected():
    """A line through what fits misses the jump; the middle finds it."""

    def jumps(hardware, batch=1):
        size = batch if batch < 777 else batch + 10**6
        return lambda x: x * 2, jax.ShapeDtypeStruct((size,), jnp.float32)

    found = targets.largest_batch(jumps, hardware(1_000_000), tolerance=0)
    assert found.best.batch == 776


def test_searches_are_refused_in_words(monkeypatch):
    def fixed(hardware):
        return lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32)

    with pytest.raises(ValueError, match="must have a parameter `batch`"):
        targets.largest_batch(fixed, hardware(1000))
    with pytest.raises(ValueError, match=r"multiple=.*must be at least 1. Got 0"):
        targets.largest_batch(doubled, hardware(1000), multiple=0)
    with pytest.raises(ValueError, match=r"tolerance=.*less than 1. Got 1.5"):
        targets.largest_batch(doubled, hardware(1000), tolerance=1.5)
    monkeypatch.setattr(search, "LARGEST_BATCH", 1000)
    with pytest.raises(ValueError, match=r"need more memory for a larger batch. Got a"):
        targets.largest_batch(
            lambda hardware, batch: (lambda x: x, jnp.ones(3)), hardware(1000)
        )
    with pytest.raises(ValueError, match=r"must be one of 'v5e', .*Got 'v9'"):
        targets.smallest_slice(fixed, "v9")


@pytest.fixture
def slices(monkeypatch):
    """The chips of "v5e" are CPU devices with a kilobyte each."""

    def made(name):
        _, _, shape = name.partition(":")
        chips = 1
        for size in shape.split("x"):
            chips *= int(size)
        return hardware(1000, min(chips, 8))

    monkeypatch.setattr(search, "target", made)
    monkeypatch.setitem(search.SLICES, "v5e", "1x1 1x2 1x4 1x8")


def sharded(hardware, batch=36):
    """Two arrays of 64 bytes an example, over all chips."""
    if hardware.chips == 1:
        raise ValueError("one chip is not enough for this mesh")
    mesh = hardware.mesh({"data": hardware.chips})
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((batch, 16), jnp.float32, sharding=sharding)
    return lambda x: x * 2, x


def test_the_smallest_slice(slices):
    """By bisection; what the job itself refuses does not fit."""
    found = targets.smallest_slice(sharded, "v5e", batch=24)
    assert found.best.target == "here:4"
    assert [(each.target, each.fits) for each in found.tried] == [
        ("here:4", True),
        ("here:2", False),
    ]
    small = targets.smallest_slice(sharded, "v5e", batch=8)
    assert small.best.target == "here:2"
    assert small.tried[-1].program is None
    assert small.tried[-1].refusal == "one chip is not enough for this mesh"
    assert targets.smallest_slice(sharded, "v5e", batch=8000).best is None


def test_a_job_that_refuses_all_slices(slices):
    """Is told, and is not called too large; another error is the job's own."""

    def never(hardware):
        raise ValueError("not today")

    with pytest.raises(ValueError, match=r"must take one of .*Got not today"):
        targets.smallest_slice(never, "v5e")

    def broken(hardware):
        raise KeyError("w")

    with pytest.raises(OwnCodeRaised, match=r"broken.*raised KeyError"):
        targets.smallest_slice(broken, "v5e")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, r"must return the function to compile and the shapes.*Got an int"),
        ((jnp.sin,), r"Got \("),
        ((1, 2), r"Got \(an int, an int\)"),
    ],
)
def test_what_a_job_returns(returned, message):
    def job(hardware):
        return returned

    with pytest.raises(ValueError, match=message):
        jobs.program_of(job, hardware(1000))
    with pytest.raises(ValueError, match="must have a parameter `batch`"):
        jobs.program_of(job, hardware(1000), batch=3)
