"""Convolutions in loops: in the one order that XLA's CPU compiler computes fast.

Speed is measured by the benchmark `data_parallel`; here the order is looked at.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jdist import _compat, optim, pipeline, verify
from jdist.data_parallel import train_step
from jdist.verify.measure import LossPrograms
from tests.data_parallel.recording import gradient_of
from tests.replicas import over

# Of an operator in the text of a lowered program.
FAST = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"


CONVOLUTIONS = {
    "images, channels last": ("NHWC", "HWIO", "NHWC", (3, 7, 6, 4), (3, 2, 4, 6), {}),
    "images, channels first": ("NCHW", "OIHW", "NCHW", (3, 4, 7, 6), (6, 4, 3, 2), {}),
    "any order": ("CWNH", "IWOH", "HWCN", (4, 7, 3, 6), (4, 2, 6, 3), {}),
    "sequences, dilated": (
        *("NWC", "WIO", "NWC", (3, 9, 4), (3, 4, 6)),
        {"rhs_dilation": (2,), "lhs_dilation": (3,)},
    ),
    "volumes, strides": (
        *("NDHWC", "DHWIO", "NDHWC", (2, 5, 6, 4, 4), (2, 3, 1, 4, 6)),
        {"window_strides": (2, 1, 3)},
    ),
    "groups of channels": (
        *("NHWC", "HWIO", "NHWC", (3, 7, 6, 4), (3, 2, 2, 6)),
        {"feature_group_count": 2},
    ),
    "groups of rows": (
        *("NHWC", "HWIO", "NHWC", (4, 7, 6, 3), (3, 2, 3, 6)),
        {"batch_group_count": 2},
    ),
    "no window": ("NC", "IO", "NC", (3, 4), (4, 6), {}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_in_loops_have_one_order_and_the_same_results(name):
    """Value and both gradients of a convolution, for several images in a loop."""
    image, kernel, result, image_shape, kernel_shape, options = CONVOLUTIONS[name]
    rng = np.random.default_rng(3)

    def whole(*shape):
        # Of whole numbers all sums are exact, whatever their order.
        return jnp.asarray(rng.integers(-9, 9, shape), jnp.float32)

    window, images = whole(*kernel_shape), whole(3, *image_shape)
    strides = (1,) * (len(image) - 2)
    options = {"window_strides": strides, "padding": "SAME", **options}
    if "lhs_dilation" in options:
        options["padding"] = [(2, 1)]

    def loss(window, x):
        numbers = (image, kernel, result)
        y = jax.lax.conv_general_dilated(
            x, window, **options, dimension_numbers=numbers
        )
        return jnp.sum(y * y), y

    grad = jax.value_and_grad(loss, (0, 1), has_aux=True)

    def several(images):
        return jax.lax.map(lambda x: grad(window, x), images)

    faster = _compat.fast_in_loops(several)
    found = jax.jit(faster)(images)
    expected = [jax.jit(grad)(window, x) for x in images]
    for number, one in enumerate(expected):
        own = jax.tree.map(lambda x, n=number: x[n], found)
        assert jax.tree.structure(own) == jax.tree.structure(one)
        for x, y in zip(*map(jax.tree.leaves, (own, one)), strict=True):
            np.testing.assert_array_equal(x, y)
    orders = {str(numbers) for numbers in _orders(faster, images)}
    assert len(orders) == 1
    assert len(list(_orders(faster, images))) == 3
    assert len({str(numbers) for numbers in _orders(several, images)}) > 1


def test_convolutions_of_programs_in_programs():
    """In a branch in a recomputed function in a loop; nothing else is touched."""
    rng = np.random.default_rng(5)
    window = jnp.asarray(rng.normal(size=(3, 3, 2, 2)), jnp.float32)
    images = jnp.asarray(rng.normal(size=(4, 3, 6, 5, 2)), jnp.float32)

    def convolved(window, x):
        return conv(x, window)

    def tanh(window, x):
        return jnp.tanh(x)

    @jax.checkpoint
    def block(window, x):
        return jax.lax.cond(x[0, 0, 0, 0] > 0, convolved, tanh, window, x)

    def several(window, images):
        def turn(total, x):
            grad = jax.grad(lambda w: jnp.sum(block(w, x) ** 2))(window)
            return jax.tree.map(jnp.add, total, {"w": grad, "none": None}), None

        return jax.lax.scan(turn, {"w": 0 * window, "none": None}, images)

    faster = _compat.fast_in_loops(several)
    found, expected = jax.jit(faster)(window, images), several(window, images)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    np.testing.assert_allclose(found[0]["w"], expected[0]["w"], rtol=1e-5)
    (first,) = set(_orders(faster, window, images))
    assert set(_orders(several, window, images)) > {first}


def test_a_program_without_convolutions_stays():
    """Values with weak types and effects too."""
    said = []

    def looped(x):
        def turn(total, y):
            jax.debug.callback(said.append, y)
            return total + 2 * y, jnp.exp(1.0 * y)

        return jax.lax.scan(turn, 0.0, x), 3

    x = jnp.arange(3.0)
    own, faster = (
        jax.make_jaxpr(fn)(x) for fn in (looped, _compat.fast_in_loops(looped))
    )
    assert str(own) == str(faster)
    _compat.fast_in_loops(looped)(x)
    jax.effects_barrier()
    assert sorted(map(float, said)) == [0, 1, 2]


def test_replicas_that_share_a_loop(mesh):
    """Under `shard_map`, with axes that vary, and under `vmap`."""
    rng = np.random.default_rng(7)
    window = jnp.asarray(rng.integers(-5, 5, (3, 3, 2, 4)), jnp.float32)
    images = jnp.asarray(rng.integers(-5, 5, (6, 5, 6, 7, 2)), jnp.float32)

    def gradient(window, images):
        each = _compat.fast_in_loops(
            lambda xs: jax.lax.map(
                lambda x: jax.grad(lambda w: jnp.sum(conv(x, w) ** 2))(window), xs
            )
        )
        return each(images).sum(0)

    together = images.reshape(-1, 6, 7, 2)
    whole = jax.grad(lambda w: jnp.sum(conv(together, w) ** 2))(window)
    replicas = images.reshape(2, 3, *images.shape[1:])
    by_vmap = jax.vmap(gradient, (None, 0), axis_name="data")(window, replicas)
    np.testing.assert_array_equal(by_vmap.sum(0), whole)

    def replica(window, images):
        own = jax.lax.pcast(window, "data", to="varying")
        return jax.lax.psum(gradient(own, images), "data")

    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        replica, mesh=mesh(2), in_specs=(everywhere, rows), out_specs=everywhere
    )
    np.testing.assert_array_equal(jax.jit(mapped)(window, images), whole)


def losses(params, batch):
    """Two convolutions with strides, the first one recomputed."""
    hidden = jax.checkpoint(lambda w, x: jax.nn.relu(conv(x, w)))(
        params["first"], batch["x"]
    )
    made = conv(hidden, params["second"], (2, 2))
    return jnp.sum((made.mean((1, 2)) - batch["y"]) ** 2, axis=-1)


@pytest.fixture
def problem(rng):
    """Parameters and a batch of 12 images."""
    shapes = {"first": (3, 3, 3, 4), "second": (3, 2, 4, 5)}
    params = {name: rng.normal(size=s).astype("f") / 4 for name, s in shapes.items()}
    batch = {"x": rng.normal(size=(12, 7, 6, 3)), "y": rng.normal(size=(12, 5))}
    return params, jax.tree.map(np.float32, batch)


@pytest.mark.parametrize("replicas", ["1", "2", "mesh"])
def test_accumulation(problem, mesh, replicas):
    """Of a training step, whose gradient is that of the whole batch."""
    where = mesh(2) if replicas == "mesh" else int(replicas)
    step = train_step(losses, optim.sgd(lr=0.1), **over(where), accumulate=3)
    params, batch = problem
    assert _orders_in(step.lower(step.init(params), batch)) == {FAST}
    found = gradient_of(losses, where, accumulate=3)
    verify.gradients(losses, params, batch, {replicas: found}).raise_if_failed()


def test_one_program_for_all_stages(rng):
    """A pipeline of convolutions over a mesh."""
    stages = [
        pipeline.Stage(lambda w, h: jnp.tanh(conv(h, w)), (before,), (after,))
        for before, after in (("x", "h"), ("h", "y"))
    ]
    piped = pipeline.Pipeline(
        stages,
        lambda y, batch: jnp.sum((y - batch["t"]) ** 2, axis=(1, 2, 3)),
        pipeline.one_f_one_b(2, 3),
        pipeline.OneProgram(Mesh(np.array(jax.devices()[:2]), ("stage",))),
    )
    params = [
        jnp.asarray(rng.normal(size=(3, 3, 2, 2)) / 4, jnp.float32) for _ in range(2)
    ]
    batch = {
        name: jnp.asarray(rng.normal(size=(6, 5, 4, 2)), jnp.float32) for name in "xt"
    }
    (lowered,) = piped.lower(params, batch).values()
    assert _orders_in(lowered) == {FAST}

    def whole(params, batch):
        h = batch["x"]
        for w in params:
            h = jnp.tanh(conv(h, w))
        return jnp.sum((h - batch["t"]) ** 2, axis=(1, 2, 3))

    candidates = {"one program": piped.value_and_grad}
    verify.gradients(whole, params, batch, candidates).raise_if_failed()


@pytest.mark.parametrize("more", [1, 120])
def test_the_judge(problem, more):
    """Which has no loop around a convolution, and compiles each large one alone."""
    params, batch = jax.tree.map(jnp.asarray, problem)
    programs = LossPrograms(losses, None)
    image = jnp.tile(batch["x"][:1], (1, more, more, 1))
    row = {"x": image, "y": batch["y"][:1]}
    pieces = programs.pieces_of(programs._program(params, row))._pieces
    names = [[x.own.primitive.name for x in piece.equations] for piece in pieces]
    found = [each for each in names if "conv_general_dilated" in each]
    assert sum(each.count("conv_general_dilated") for each in found) > 3
    assert all({"scan", "while"}.isdisjoint(each) for each in found)
    assert more == 1 or all(len(each) == 1 for each in found)


@pytest.mark.parametrize(("more", "together"), [(1, True), (10, False)])
def test_the_judge_runs_examples_with_small_convolutions_together(
    problem, more, together
):
    """Where XLA has a fast kernel for many; with large ones one after the other."""
    params, batch = jax.tree.map(jnp.asarray, problem)
    batch = {**batch, "x": jnp.tile(batch["x"], (1, more, more, 1))}
    shares = np.ones(len(batch["x"]))
    _, count = LossPrograms(losses, None)._examples_program(params, batch, shares)
    assert count == (len(shares) if together else 1)


def conv(x, window, strides=(1, 1)):
    """A convolution of images `(rows, height, width, channels)`."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, window, strides, "SAME", dimension_numbers=numbers
    )


def _orders_in(lowered):
    """The orders of axes of all convolutions of a lowered program."""
    text = lowered.as_text()
    assert text.count("stablehlo.while")
    return set(re.findall(r"dim_numbers = (\[.*?\]->\[.*?\])", text))


def _orders(fn, *arguments):
    """The dimension numbers of all convolutions of a program."""
    for equation in _compat.equations_in(jax.make_jaxpr(fn)(*arguments)):
        if equation.primitive.name == "conv_general_dilated":
            yield equation.params["dimension_numbers"]
