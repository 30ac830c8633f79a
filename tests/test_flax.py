"""Modules taken apart, and their random streams begun again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist._flax import RandomStreams, other_variables, run, taken_apart


class Noisy(nnx.Module):
    """A parameter, a state, two streams, one of which is for several calls."""

    def __init__(self):
        self.scale = nnx.Param(jnp.float32([2, 3]))
        self.calls = nnx.Variable(jnp.int32(5))
        self.one = nnx.RngStream(jax.random.key(0), tag="one")
        self.many = nnx.RngStream(jax.random.key(1), tag="many").split(3)

    def __call__(self, x):
        self.calls[...] += 1
        return x * self.scale[...] + jax.random.normal(self.one(), x.shape, x.dtype)


def test_streams_have_keys_of_their_own_and_their_shapes():
    streams = taken_apart(Noisy()).streams
    begun = RandomStreams.of(streams).begun(jax.random.key(7))
    assert [x.shape for x in jax.tree.leaves(begun)] == [
        x.shape for x in jax.tree.leaves(streams)
    ]
    keys = jax.tree.leaves(nnx.filter_state(begun, nnx.RngKey))
    words = [jax.random.key_data(key).reshape(-1, 2) for key in keys]
    assert len({tuple(row.tolist()) for row in np.concatenate(words)}) == 4


def test_equal_structures_are_equal():
    """What is compiled for one serves the other."""
    first, second = (RandomStreams.of(taken_apart(Noisy()).streams) for _ in range(2))
    other = RandomStreams.of(taken_apart(nnx.Rngs(3)).streams)
    assert (first, hash(first)) == (second, hash(second))
    assert first != other


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("lifted", [False, True])
def test_draws_are_seen(calls, lifted):
    """Also where a lifted call returns arrays of counts that are new in any case."""
    parts = taken_apart(Noisy())

    def called(module):
        def several(module, x):
            for _ in range(calls):
                module(x)

        call = nnx.remat(several) if lifted else several
        call(module, jnp.float32([1, 4]))

    found = run(called, parts)
    assert found.drew() == bool(calls)
    assert jax.tree.leaves(found.rest) == [5 + calls]
    assert jax.tree.leaves(parts.rest) == [5]  # no part is the module's own


def test_variables_beside_parameters_are_found_in_any_tree():
    found = other_variables({"net": [Noisy()], "w": nnx.Param(1.0), "x": 2.0})
    assert found["net/0/calls"] == "Variable"
    assert set(found.values()) == {"RngCount", "RngKey", "Variable"}
    assert other_variables(nnx.state(Noisy(), nnx.Param)) == {}
