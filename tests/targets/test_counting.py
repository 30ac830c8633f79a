"""Operations, bytes and turns of programs that are compiled here, against counting."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist import targets

HERE = targets.Hardware(
    targets.Chip("here", "cpu", 2**30, 1e10, {"float32": 1e11}), (1,)
)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("ij,jk->ik", {"i": 17, "j": 33, "k": 9}),
        ("bij,bjk->bik", {"b": 3, "i": 5, "j": 16, "k": 7}),
        ("ij,kj->ik", {"i": 40, "j": 64, "k": 24}),
        ("bhqd,bhkd->bhqk", {"b": 2, "h": 3, "q": 11, "k": 13, "d": 8}),
        ("ijk,jkl->il", {"i": 6, "j": 5, "k": 4, "l": 10}),
    ],
)
def test_products_count_every_pair(equation, sizes):
    """A multiplication and an addition for each of all letters."""
    left, right = equation.partition("->")[0].split(",")
    arguments = [shape(*(sizes[x] for x in letters)) for letters in (left, right)]
    found = targets.compile(
        lambda a, b: jnp.einsum(equation, a, b), *arguments, target=HERE
    )
    assert found.flops == 2 * np.prod(list(sizes.values()))


def pairs(size, kernel, stride, low, out, spread, dilation):
    """Pairs of an output and a kernel element that meet an input, one by one."""
    count = 0
    for o, k in itertools.product(range(out), range(kernel)):
        place = o * stride - low + k * spread
        count += 0 <= place <= (size - 1) * dilation and place % dilation == 0
    return count


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "spread"),
    [
        (1, "VALID", 1, 1),
        (1, "SAME", 1, 1),
        (2, "SAME", 1, 1),
        (1, [(3, 0)], 1, 1),
        (1, "VALID", 1, 3),
        (1, [(2, 2)], 2, 1),
        (3, [(1, 4)], 2, 2),
    ],
)
def test_convolutions_count_what_is_no_padding(stride, padding, dilation, spread):
    """Strides, padding, dilated inputs and kernels."""
    batch, inputs, outputs, size, kernel = 3, 4, 5, 19, 4

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (stride,), padding, (dilation,), (spread,)
        )

    x, w = shape(batch, inputs, size), shape(outputs, inputs, kernel)
    found = targets.compile(convolve, x, w, target=HERE)
    out = jax.eval_shape(convolve, x, w).shape[2]
    low = padding[0][0] if isinstance(padding, list) else 0
    if padding == "SAME":
        low = max((out - 1) * stride + kernel - size, 0) // 2
    taps = pairs(size, kernel, stride, low, out, spread, dilation)
    assert found.flops == 2 * batch * inputs * outputs * taps


@pytest.mark.parametrize(("turns", "inner"), [(1, 1), (2, 3), (7, 1), (5, 4), (100, 2)])
def test_loops_count_every_turn(turns, inner):
    """Also of a loop inside a loop."""

    def step(x, w):
        def again(x, _):
            return lax.fori_loop(0, inner, lambda i, x: jnp.tanh(x @ w), x), None

        return lax.scan(again, x, None, length=turns)[0]

    found = targets.compile(step, shape(6, 8), shape(8, 8), target=HERE)
    assert found.flops == turns * inner * 2 * 6 * 8 * 8
    assert "unknown length" not in found.estimate.model


def test_a_gradient_counts_what_it_needs():
    """Products for the parameters; for inputs and outputs where they are read."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w[0]) @ w[1])

    w = [shape(8, 16), shape(16, 4)]
    found = targets.compile(jax.grad(loss), w, shape(32, 8), target=HERE)
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    # The first layer's inputs have no cotangent, and a sum's value is not asked for.
    assert found.flops == (first + first) + (second + second)


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_are_those_of_what_is_read_and_written(count):
    """One elementwise kernel, however many operations it fuses."""

    def fused(*arrays):
        return sum(jnp.sin(x) * 2 for x in arrays)

    arrays = [shape(64, 128)] * count
    found = targets.compile(fused, *arrays, target=HERE)
    assert found.flops == 0
    assert found.bytes_accessed == (count + 1) * 64 * 128 * 4
    memory = found.bytes_per_device
    assert (memory.arguments, memory.outputs) == (count * 32768, 32768)
    assert found.estimate.memory == found.bytes_accessed / 1e10
