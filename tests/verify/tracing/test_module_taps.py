"""Flax NNX models with a tap at every submodule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import verify


class Block(nnx.Module):
    """A residual block of two layers."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.outer = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(jnp.tanh(self.inner(x)))


class Model(nnx.Module):
    """Two blocks, of which the second is used twice."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        return self.blocks[1](self.blocks[1](self.blocks[0](x)))


NAMES = [
    f"blocks/{i}{part}" for i in (0, 1, 1) for part in ("/inner", "/outer", "")
]  # fmt: skip
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def recorded(fn, *arguments):
    with verify.TapRecording() as recording:
        found = jax.block_until_ready(fn(*arguments))
    return found, [r.name for r in recording.records if r.cotangent is None]


def test_every_submodule_is_marked_in_a_copy():
    model = Model(nnx.Rngs(0))
    marked = verify.tapped(model)
    expected = model(X)
    found, names = recorded(marked, X)
    assert np.array_equal(found, expected)
    assert names == NAMES
    assert recorded(model, X)[1] == []
    assert type(marked) is Model
    assert type(marked.blocks[0]) is type(verify.tapped(model).blocks[1])


def test_split_and_merge_keep_the_marks():
    graph, params = nnx.split(verify.tapped(Model(nnx.Rngs(0))), nnx.Param)
    called = jax.jit(lambda p, x: nnx.merge(graph, p)(x))
    plain = called(params, X)
    found, names = recorded(called, params, X)
    assert sorted(names) == sorted(NAMES)
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_layers_in_a_scan_are_passages_of_one_tap():
    @nnx.vmap
    def made(key):
        return Block(nnx.Rngs(key))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = made(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            step = nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return step(x, self.layers)

    model = verify.tapped(Stack())
    graph, params = nnx.split(model, nnx.Param)

    def losses(params, x):
        return jnp.sum(nnx.merge(graph, params)(x) ** 2, axis=1)

    def halves(params, x):
        mean = jax.value_and_grad(lambda p, x: jnp.mean(losses(p, x)))
        (a, da), (b, db) = mean(params, x[:2]), mean(params, x[2:4])
        return (a + b) / 2, jax.tree.map(lambda a, b: (a + b) / 2, da, db)

    trace = verify.trace(losses, params, X[:4], halves, finite_differences=False)
    assert trace.raise_if_failed().difference is None
    assert trace.right[:4] == (
        "forward layers/inner[0]", "forward layers/outer[0]", "forward layers[0]",
        "forward layers/inner[1]",
    )  # fmt: skip
    assert len(trace.right) == 18


def test_a_wrong_submodule_is_named_by_its_path():
    """In one micro-batch; the batch is a list of NumPy's arrays."""
    graph, params = nnx.split(verify.tapped(Block(nnx.Rngs(0))), nnx.Param)

    def losses(params, batch):
        (x,) = batch
        return jnp.sum(nnx.merge(graph, params)(x) ** 2, axis=1)

    @jax.jit
    def part(params, batch):
        return jax.value_and_grad(lambda p, b: losses(p, b).sum() / 5)(params, batch)

    def turned(params):
        model = nnx.merge(graph, params)
        model.outer.kernel[...] *= -1
        return nnx.state(model, nnx.Param)

    def in_two(change):
        def candidate(params, batch):
            (x,) = batch
            first, second = part(params, [x[:3]]), part(change(params), [x[3:]])
            return jax.tree.map(jnp.add, first, second)

        return candidate

    judged = verify.trace_judge(
        losses, params, [np.asarray(X)], finite_differences=False
    )
    right = judged(in_two(lambda p: p))
    assert right.raise_if_failed().difference is None
    assert len(right.right) == 4
    found = judged(in_two(turned)).difference
    assert (found.direction, found.tap) == ("forward", "outer")
    assert found.examples == (3, 4)


@pytest.mark.parametrize("model", [None, 3, {"w": 1.0}, nnx.Linear, jax.nn.relu])
def test_what_is_no_module(model):
    with pytest.raises(TypeError, match=r"tapped\(model\)` must be a Flax NNX module"):
        verify.tapped(model)
