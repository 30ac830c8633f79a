"""Every case: right gradients, the bytes of theory, one compilation, no work twice."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment
from jdist.segment._lookup.cache import VERSIONS
from jdist.segment._segment import CACHE
from tests.segment.cases import (
    CASES,
    assert_close,
    assert_same_bits,
    cotangents,
    reference,
)

pytestmark = pytest.mark.compiled

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@CASE
def test_gradients_equal_jax_vjp(case, rng):
    """Whole and split backward give the gradients of `jax.vjp` to rounding."""
    params, inputs = case.params(rng), case.inputs(rng)
    seg = segment(case.fn)
    outputs, residuals = seg.forward(params, *inputs)
    assert_close(outputs, jax.jit(case.fn)(params, *inputs), case)
    d_outputs = cotangents(rng, outputs)
    expected = reference(case.fn, params, inputs, d_outputs)
    assert_close(seg.backward(params, residuals, d_outputs), expected, case)
    d_inputs, rest = seg.backward_inputs(params, residuals, d_outputs)
    assert_close((seg.backward_params(rest), d_inputs), expected, case)


@pytest.mark.parametrize("name", ["tied", "tanh_mlp", "transformer", "scanned"])
def test_in_double_precision(name, rng):
    """In float64 segments and `jax.vjp` agree to float64's rounding."""
    case = CASES[name]

    def widened(x):
        return x.astype(np.float64) if x.dtype == np.float32 else x

    params, inputs = jax.tree.map(widened, (case.params(rng), case.inputs(rng)))
    seg = segment(case.fn)
    outputs, residuals = seg.forward(params, *inputs)
    d_outputs = cotangents(rng, outputs)
    found = seg.backward(params, residuals, d_outputs)
    expected = reference(case.fn, params, inputs, d_outputs)
    assert_close(found, expected, roundings=case.roundings, unit=2.0**-53)


@pytest.mark.parametrize("recompute", [True, "dots"])
@pytest.mark.parametrize("name", ["relu_mlp", "dropout", "conv_norm", "scanned"])
def test_gradients_with_recomputation(name, recompute, rng):
    """Recomputation changes no gradient beyond rounding."""
    case = CASES[name]
    params, inputs = case.params(rng), case.inputs(rng)
    seg = segment(case.fn, recompute=recompute)
    outputs, residuals = seg.forward(params, *inputs)
    d_outputs = cotangents(rng, outputs)
    expected = reference(case.fn, params, inputs, d_outputs)
    assert_close(seg.backward(params, residuals, d_outputs), expected, case)
    d_inputs, rest = seg.backward_inputs(params, residuals, d_outputs)
    assert_close((seg.backward_params(rest), d_inputs), expected, case)


# --- memory ---


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


def growth(seg, params, micro_batches):
    """Live bytes beyond arguments and outputs, after each forward pass.

    The garbage of other tests is collected first; this one's own must go without.
    """
    seg.forward(params, *micro_batches[0])  # Compile first.
    gc.collect()
    before = live_bytes()
    in_flight, seen = [], []
    for inputs in micro_batches:
        in_flight.append(jax.block_until_ready(seg.forward(params, *inputs)))
        outputs = [x for found, _ in in_flight for x in jax.tree.leaves(found)]
        seen.append(live_bytes() - before - sum(x.nbytes for x in outputs))
    del outputs
    in_flight.clear()
    assert live_bytes() == before, "arrays outlive the last reference to them"
    return seen


@CASE
def test_bytes_in_flight(case, rng):
    """k forwards in flight cost k times what theory says; no weight is among it."""
    params = case.params(rng)
    micro_batches = [case.inputs(rng) for _ in range(8)]
    seen = growth(segment(case.fn), params, micro_batches)
    assert seen == [k * case.kept for k in range(1, 9)]


@pytest.mark.parametrize("name", ["linear", "relu_mlp", "dropout", "transformer"])
def test_no_bytes_in_flight_with_recomputation(name, rng):
    """With `recompute=True` only the inputs are kept, by reference."""
    case = CASES[name]
    params = case.params(rng)
    micro_batches = [case.inputs(rng) for _ in range(8)]
    assert growth(segment(case.fn, recompute=True), params, micro_batches) == [0] * 8


def test_bytes_with_dots_kept(rng):
    """With "dots" reductions are made again too: statistics, sums of a softmax."""
    case = CASES["transformer"]
    params = case.params(rng)
    micro_batches = [case.inputs(rng) for _ in range(3)]
    full = growth(segment(case.fn), params, micro_batches)
    dots = growth(segment(case.fn, recompute="dots"), params, micro_batches)
    b, t, _ = micro_batches[0][0].shape
    # The statistics of both layer norms and the sums of the softmax are made again.
    statistics = 4 * b * t * (2 * 2 + 2)
    assert dots == [seen - k * statistics for k, seen in enumerate(full, 1)]


@CASE
def test_bytes_of_a_pending_second_half(case, rng):
    """The rest of a split backward holds no parameter's bytes either."""
    params, inputs = case.params(rng), case.inputs(rng)
    seg = segment(case.fn)
    outputs, residuals = seg.forward(params, *inputs)
    d_outputs = cotangents(rng, outputs)
    d_inputs, rest = seg.backward_inputs(params, residuals, d_outputs)
    held = {id(x) for x in jax.tree.leaves((params, residuals, d_outputs, d_inputs))}
    fresh = [x for x in rest.arrays if id(x) not in held]
    shapes = {x.shape for x in jax.tree.leaves(params) if x.ndim > 1 and x.size > 8}
    if case.fn.__name__.startswith("_scanned"):  # A loop yields gradients, ready.
        expected = sorted(x.shape for x in jax.tree.leaves(params))
        assert sorted(x.shape for x in fresh) == expected
        return
    assert not shapes & {x.shape for x in fresh}
    assert not shapes & {x.shape[::-1] for x in fresh}


# --- compilations and work ---


@pytest.mark.parametrize("name", ["linear", "relu_mlp", "unused", "dropout", "scanned"])
def test_one_compilation_per_half(name, rng, compilations):
    """Four halves are four programs, however often and on whatever values they run."""
    case = CASES[name]
    calls = [(case.params(rng), case.inputs(rng)) for _ in range(3)]
    d_outputs = cotangents(rng, jax.eval_shape(case.fn, calls[0][0], *calls[0][1]))
    CACHE.clear()
    VERSIONS.clear()
    seg = segment(case.fn)
    jax.block_until_ready((calls, d_outputs))
    compilations.clear()
    for params, inputs in calls:
        _, residuals = seg.forward(params, *inputs)
        seg.backward(params, residuals, d_outputs)
    assert len(compilations) == 2
    for params, inputs in calls:
        _, residuals = seg.forward(params, *inputs)
        _, rest = seg.backward_inputs(params, residuals, d_outputs)
        seg.backward_params(rest)
    # The second half of a loop has nothing left to compute.
    assert len(compilations) == 4 - (name == "scanned")


def products(half, *arguments):
    """The matrix products and convolutions in a compiled program, on the CPU."""
    text = half.lower(*arguments).compile().as_text()
    return len(re.findall(r"= \S+ (?:dot|convolution)\(", text)) + len(
        re.findall(r"custom_call_target=\"[^\"]*(?:dot|matmul|gemm|conv)", text)
    )


# Products in the forward, in the backward's first half, and in its second.
PRODUCTS = {
    "transposed": (1, 1, 1),
    "tied": (2, 2, 2),
    "relu_mlp": (2, 2, 2),
    # u @ v is made again in the first half; its gradient then has two factors.
    "low_rank": (3, 3, 4),
    "embedding": (1, 0, 2),
    # q, k, v, scores, mixing, o, up, down: each has one product for either side, the
    # scores and the mixing two for the first.
    "transformer": (8, 10, 6),
    # The loop is one program with both products.
    "scanned": (1, 2, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_product_twice(name, rng):
    """The halves of the backward have together the products of the whole."""
    case = CASES[name]
    with jax.default_device(jax.devices("cpu")[0]):
        params, inputs = case.params(rng), case.inputs(rng)
        seg = segment(case.fn)
        outputs, residuals = seg.forward(params, *inputs)
        d_outputs = cotangents(rng, outputs)
        _, rest = seg.backward_inputs(params, residuals, d_outputs)
        halves = seg._halves
        forward = products(halves.forward, params, inputs)
        whole = products(
            halves.backward, None, None, None, params, residuals, d_outputs, None
        )
        first = products(halves.first, params, residuals, d_outputs, None)
        second = 0
        if None in rest.split.ready:
            second = products(halves.second, None, None, None, rest, None)
    assert (forward, first, second) == PRODUCTS[name]
    assert whole == first + second


# --- the same bits ---


@pytest.mark.parametrize("name", ["relu_mlp", "dropout", "conv_norm", "scanned"])
def test_same_bits_every_time(name, rng):
    """The same call gives the same bits, also after everything is compiled anew.

    A GPU may choose other kernels at each compilation and add in any order unless
    `XLA_FLAGS` has `--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0`.
    """
    case = CASES[name]
    params, inputs = case.params(rng), case.inputs(rng)

    def run(seg, d_outputs=None):
        outputs, residuals = seg.forward(params, *inputs)
        if d_outputs is None:
            d_outputs = cotangents(np.random.default_rng(1), outputs)
        d_inputs, rest = seg.backward_inputs(params, residuals, d_outputs)
        whole = seg.backward(params, residuals, d_outputs)
        return outputs, whole, d_inputs, seg.backward_params(rest)

    first = run(segment(case.fn))
    assert_same_bits(run(segment(case.fn)), first)
    CACHE.clear()
    VERSIONS.clear()
    assert_same_bits(run(segment(case.fn)), first)


def test_stale_order_of_backward_passes(rng):
    """Backward passes may run in any order, and again."""
    case = CASES["tanh_mlp"]
    params = case.params(rng)
    seg = segment(case.fn)
    calls = [seg.forward(params, *case.inputs(rng)) for _ in range(3)]
    d_outputs = [jnp.sin(outputs) for outputs, _ in calls]
    pairs = list(zip((r for _, r in calls), d_outputs, strict=True))
    forwards = [seg.backward(params, r, d) for r, d in pairs]
    backwards = [seg.backward(params, r, d) for r, d in pairs[::-1]][::-1]
    assert_same_bits(backwards, forwards)
