"""Padded batches: value and gradient of the unpadded batch, by few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.recording import padding
from jdist.segment import RecompilationWarning
from tests.autograd import engine_cases as cases

SIZES = (3, 8, 5, 1, 7)


@pytest.fixture
def alone():
    with rpc.local_cluster(["a"]):
        yield


def whole(*shape, seed=0):
    """Small integers, whose sums are exact in whatever order."""
    numbers = np.random.default_rng(seed).integers(-4, 5, shape)
    return numbers.astype(np.float32)


def losses(w, x, y):
    """Two values for each example; the square root of a zero row would be infinite."""
    z = x @ w
    return {"loss": ((z - y[:, None]) ** 2).sum(1), "norm": jnp.abs(x).max(1)}


def gradients(x, y, at, **options):
    w = autograd.variable(whole(4, 3, seed=9))
    inputs = autograd.variable(x)
    with autograd.context() as context_id:
        found = autograd.apply(losses, w, inputs * 2.0, y, **options)
        values = jax.tree.map(lambda leaf: np.asarray(leaf.value), found)
        autograd.backward(context_id, [found["loss"]], cotangents=[at])
        d = autograd.get_gradients(context_id)
        return values, np.asarray(d[w]), np.asarray(d[inputs])


@pytest.mark.parametrize("sizes", [4, 8, (2, 5, 9)])
@pytest.mark.parametrize("put", [np.asarray, jnp.asarray, jax.device_put])
def test_value_and_gradient_are_those_without_padding(alone, sizes, put):
    for k, rows in enumerate(SIZES):
        x, y, at = whole(rows, 4, seed=k), put(whole(rows, seed=k)), whole(rows, seed=5)
        found = gradients(x, y, at, pad=autograd.pad_to(sizes))
        expected = gradients(x, y, at)
        assert found[0]["loss"].shape == (rows,)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def ones_per_row(w, x):
    return jnp.log(x).sum(1) * w


def test_a_repeated_example_brings_no_nan(alone):
    """A row of zeros would: its logarithm's derivative is infinite."""
    w, x = autograd.variable(np.float32(3)), autograd.variable(whole(3, 2) ** 2 + 1)
    with autograd.context() as context_id:
        out = autograd.apply(ones_per_row, w, x.value, pad=autograd.pad_to(8))
        autograd.backward(context_id, [out.sum()])
        gradient = autograd.get_gradients(context_id)[w]
    np.testing.assert_allclose(gradient, np.log(x.value).sum(), rtol=1e-6)


def shifted(w, x):
    return jnp.cos(x * w[None])


def test_few_programs_for_many_sizes(alone, compilations):
    """Both halves once for each padded size, and nothing for any other."""
    w, counts = autograd.variable(whole(6, seed=1)), []
    for rows in (5, 3, 8, 7, 12, 9, 1, 16):
        before = len(compilations)
        with autograd.context() as context_id:
            x = whole(rows, 6, seed=rows)
            out = autograd.apply(shifted, w, x, pad=autograd.pad_to(8))
            ones = np.ones((rows, 6), np.float32)
            autograd.backward(context_id, [out], cotangents=[ones])
        counts.append(len(compilations) - before)
    assert counts == [2, 0, 0, 0, 2, 0, 0, 0]


def test_placement_stays(alone):
    w = autograd.variable(whole(6, seed=1))
    x = jax.device_put(whole(3, 6), jax.devices()[4])
    out = autograd.apply(shifted, w, x, pad=autograd.pad_to(4))
    assert (out.value.devices(), out.value.committed) == ({jax.devices()[4]}, True)
    out = autograd.apply(shifted, w, whole(3, 6), pad=autograd.pad_to(4))
    assert not out.value.committed


def table_of(w, table, x):
    return x * w[None] + table[:2].sum(0)[None]


def test_arguments_that_are_no_batch(alone):
    w, table, x = autograd.variable(whole(6)), whole(3, 6, seed=2), whole(5, 6, seed=3)
    pad = autograd.pad_to(4, args=[2])
    out = autograd.apply(table_of, w, table, x, pad=pad)
    expected = x * np.asarray(w.value) + table[:2].sum(0)
    np.testing.assert_array_equal(out.value, expected)
    with pytest.raises(ValueError, match="3 in argument 1, 5 in argument 2"):
        autograd.apply(table_of, w, table, x, pad=autograd.pad_to(4))
    with pytest.raises(ValueError, match=r"positions of the 3 arguments. Got \[3\]"):
        autograd.apply(table_of, w, table, x, pad=autograd.pad_to(4, args=[3]))


def test_across_workers(threads):
    threads.run(0, away)


def away():
    """Values from another worker, of other sizes than are compilations here."""
    w = autograd.variable(whole(6, seed=1))
    x = autograd.variable(whole(5, 6, seed=2))
    for options in ({}, {"pad": autograd.pad_to(4)}):
        with autograd.context() as context_id:
            rows = rpc.rpc_sync("worker1", cases.sine, args=(x,))
            out = autograd.apply(shifted, w, rows, **options)
            total = rpc.rpc_sync("worker2", cases.total, args=(out,))
            autograd.backward(context_id, [total])
            found = autograd.get_gradients(context_id)
            if not options:
                expected = [np.asarray(found[v]) for v in (w, x)]
    for one, other in zip((found[w], found[x]), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def own_pad(x, pad):
    return x * pad


def test_a_function_with_an_argument_of_that_name(alone):
    x = autograd.variable(np.float32([1, 2]))
    out = autograd.apply(own_pad, x, pad=3.0)
    assert out.value.tolist() == [3, 6]


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(lambda w, x: (x * w[None]).sum(), r"\(\)"), (lambda w, x: w, r"\(6,\)")],
    ids=["sum", "constant"],
)
def test_a_reduction_over_the_batch_is_refused(alone, fn, shape):
    """For every size, also one that needs no padding."""
    w = autograd.variable(whole(6))
    for rows in (3, 4):
        with pytest.raises(ValueError, match=f"output of shape {shape} at .* for 4"):
            autograd.apply(fn, w, whole(rows, 6), pad=autograd.pad_to(4))


def centered(w, x):
    return (x - x.mean(0, keepdims=True)) * w[None]


def normalized(w, x):
    z = x - x.mean(0, keepdims=True)
    return {"n": z / (z.std(0, keepdims=True) + 1) * w[None], "z": x * w[None]}


@pytest.mark.parametrize(("fn", "path"), [(centered, "root"), (normalized, "n")])
def test_a_function_that_mixes_examples_is_refused(alone, fn, path):
    """Once examples can tell; a single one, or equal ones, cannot."""
    w, pad = autograd.variable(whole(6)), autograd.pad_to(8)
    for rows in (whole(1, 6), np.ones((5, 6), np.float32)):
        autograd.apply(fn, w, rows, pad=pad)
    match = rf"independently. Got an output at .*{path}.* example 0 depends on other"
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            autograd.apply(fn, w, whole(5, 6), pad=pad)
    recorded = autograd.variable(whole(5, 6)) * 2.0
    with pytest.raises(ValueError, match=match):
        autograd.apply(fn, w, recorded, pad=pad)
    assert autograd.apply(fn, w, whole(8, 6), pad=pad) is not None  # nothing is padded


def dropped(w, x, key, rate):
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x * w[None], 0)


def test_dropout_is_no_mixing(alone):
    """Its mask is that of the padded batch, whatever is repeated."""
    w, pad = autograd.variable(whole(6, seed=2)), autograd.pad_to(8, args=[1])
    for seed in range(3):
        out = autograd.apply(
            dropped, w, whole(5, 6, seed=seed), jax.random.key(seed), 0.5, pad=pad
        )
        assert out.shape == (5, 6)


def gated(w, x):
    return x + w[None] * (x - x.mean(0, keepdims=True))


def test_mixing_that_begins_later_is_refused(alone):
    """With a gate of zero, as many are initialized, no output tells."""
    pad = autograd.pad_to(8)
    autograd.apply(
        gated, autograd.variable(np.zeros(6, np.float32)), whole(5, 6), pad=pad
    )
    with pytest.raises(ValueError, match="example 0 depends on other"):
        autograd.apply(gated, autograd.variable(whole(6)), whole(5, 6), pad=pad)


def test_outputs_without_a_history_are_checked(alone):
    w = autograd.variable(whole(6))
    with pytest.raises(ValueError, match="example 0 depends on other"):
        autograd.apply(
            lambda w, x: jax.lax.stop_gradient(centered(w, x)), w, whole(5, 6),
            pad=autograd.pad_to(8),
        )  # fmt: skip


def relative_to_largest(w, x):
    return (x - x.max(0, keepdims=True)) * w[None]


@pytest.mark.parametrize("largest", [0, 2])
def test_an_extreme_of_the_batch_has_its_gradient(alone, largest):
    """Repeated examples change no output, and share the gradient of the extreme."""
    rows = whole(3, 6)
    rows[largest] += 10
    w = autograd.variable(whole(6))
    found = []
    for options in ({}, {"pad": autograd.pad_to(8)}):
        x = autograd.variable(rows)
        with autograd.context() as context_id:
            out = autograd.apply(relative_to_largest, w, x * 1.0, **options)
            autograd.backward(context_id, [(out * out).sum()])
            found.append(np.asarray(autograd.get_gradients(context_id)[x]))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    assert np.abs(found[0][largest]).max() > 0.1


def test_a_function_runs_twice_at_uses_1_2_4_of_each_size(alone, monkeypatch):
    w, pad, runs = autograd.variable(whole(6)), autograd.pad_to(8), []
    record = padding.record

    def counted(fn, args, kwargs):
        runs.append(len(args[1]))
        return record(fn, args, kwargs)

    monkeypatch.setattr(padding, "record", counted)
    for rows in (5, 3, 7, 8, 12, 9):
        autograd.apply(lambda w, x: jnp.cosh(x) * w[None], w, whole(rows, 6), pad=pad)
    assert runs == [8] * 6 + [16] * 4


def test_a_function_that_is_not_deterministic_proves_nothing(alone):
    w, runs = autograd.variable(whole(6)), iter(range(100))

    def noise(x):
        return x + np.float32(next(runs))

    def fn(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(noise, shape, x) + x * w[None]

    out = autograd.apply(fn, w, whole(5, 6), pad=autograd.pad_to(8))
    assert out.shape == (5, 6)


def test_batches_that_cannot_be_padded(alone):
    w = autograd.variable(whole(6))
    with pytest.raises(ValueError, match=r"largest is 8\. Got a batch of 9 examples"):
        autograd.apply(shifted, w, whole(9, 6), pad=autograd.pad_to([8, 4]))
    with pytest.raises(ValueError, match="a batch of 0 examples"):
        autograd.apply(shifted, w, whole(0, 6), pad=autograd.pad_to(4))
    with pytest.raises(
        ValueError, match="must have an argument with a first dimension"
    ):
        autograd.apply(shifted, w, 2.0, pad=autograd.pad_to(4))
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(TypeError, match="not traced ones or keys"):
        autograd.apply(shifted, w, keys, pad=autograd.pad_to(4))


@pytest.mark.parametrize("sizes", [0, -2, True, [], [4, 0], [4, 2.5]])
def test_sizes_are_positive(sizes):
    with pytest.raises(
        ValueError, match=r"pad_to\(sizes\)` must be a positive integer"
    ):
        autograd.pad_to(sizes)


def test_arguments_of_pad_to():
    for sizes in ("8", 2.5, None):
        with pytest.raises(TypeError, match="must be an integer or several"):
            autograd.pad_to(sizes)
    with pytest.raises(ValueError, match="must be positions of arguments, from 0"):
        autograd.pad_to(8, args=[-1])


def total_of(w, x):
    return (jnp.sinh(x) * w[None]).sum()


def test_ragged_batches_are_warned_of(alone):
    """With the name of the function, the shapes and what to do; not where padded."""
    w = autograd.variable(whole(6))
    for rows in range(1, 8):
        autograd.apply(total_of, w, whole(rows, 6))
    expected = r"apply compiles total_of .* float32\[7,6\] then float32\[8,6\]"
    with pytest.warns(RecompilationWarning, match=expected):
        autograd.apply(total_of, w, whole(8, 6))
    for rows in range(1, 30):
        autograd.apply(shifted, w, whole(rows, 6), pad=autograd.pad_to(8))
