"""Flax NNX modules: gradients of parameters, and updates of the other variables."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import autograd


class Noisy(nnx.Module):
    """A layer, statistics and noise."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


class Scaled(nnx.Module):
    """A constant that is no parameter."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.scale = nnx.data(jnp.full(4, 2.0))

    def __call__(self, x):
        return self.linear(x) * self.scale


def rngs():
    return nnx.Rngs(7)


def inputs(seed=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(5, 3)), jnp.float32)


REMEDY = r"nnx\.split\(module, nnx\.Param, \.\.\.\)"
STATEFUL = {
    "statistics": lambda: nnx.BatchNorm(4, rngs=rngs()),
    "noise": lambda: nnx.Dropout(0.5, rngs=rngs()),
    "all": lambda: Noisy(rngs()),
    "in a tree": lambda: {"w": jnp.ones(2), "layers": [nnx.BatchNorm(2, rngs=rngs())]},
    "a constant": lambda: Scaled(rngs()),
    "state": lambda: nnx.state(Noisy(rngs())),
    "rest": lambda: nnx.split(Noisy(rngs()), nnx.Param, ...)[2],
    "a variable of Flax": lambda: {"mean": nnx.BatchStat(jnp.zeros(3))},
    "streams": lambda: {"w": jnp.ones(2), "rngs": rngs()},
}
NAMED = {
    "statistics": "BatchStat at mean, BatchStat at var",
    "noise": "RngCount at rngs/count, RngKey at rngs/key",
    "in a tree": "BatchStat at layers/0/mean",
    "a constant": "at scale",
    "a variable of Flax": "BatchStat at mean",
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_variable_holds_parameters_only(kind):
    text = "must hold no state but nnx.Param: it would never change. Got .*"
    with pytest.raises(TypeError, match=text + NAMED.get(kind, "") + ".*" + REMEDY):
        autograd.variable(STATEFUL[kind]())


def test_modules_of_parameters_are_trees():
    linear = nnx.Linear(3, 4, rngs=rngs())
    for tree in (linear, nnx.state(linear), nnx.state(Noisy(rngs()), nnx.Param)):
        assert autograd.variable(tree).structure == jax.tree.structure(tree)
    w, x = autograd.variable(linear), inputs()
    y = autograd.apply(lambda w, x: w(x), w, x)
    np.testing.assert_allclose(y.value, linear(x), rtol=1e-6)


def in_the_way_of_the_remedy(graph):
    def run(params, rest, x):
        module = nnx.merge(graph, params, rest)
        y = module(x)
        return y, nnx.state(module, nnx.Not(nnx.Param))

    return run


def test_the_remedy_moves_the_state():
    """Its masks differ from call to call, and its statistics are Flax's own."""
    module, x = Noisy(rngs()), inputs()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    w, run = autograd.variable(params), in_the_way_of_the_remedy(graph)
    found = []
    for _ in range(2):
        y, rest = autograd.apply(run, w, rest, x)
        found.append(np.asarray(getattr(y, "value", y)))
        np.testing.assert_allclose(found[-1], module(x), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(found[0] == 0, found[1] == 0)
    moved = jax.tree.leaves(nnx.state(module, nnx.BatchStat))
    kept = jax.tree.leaves(nnx.filter_state(rest, nnx.BatchStat))
    assert len(moved) == 2
    for here, there in zip(moved, kept, strict=True):
        # They depend on the parameters, and so have a history.
        array = getattr(there, "value", there)
        np.testing.assert_allclose(np.asarray(array), here, rtol=1e-5, atol=1e-6)


def use(w, module, x):
    return module(x) * w


CHANGED = {
    "statistics": (lambda: nnx.BatchNorm(3, rngs=rngs()), "1/mean.*1/var"),
    "noise": (lambda: nnx.Dropout(0.5, rngs=rngs()), "1/rngs/count"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_module_beside_a_variable_is_not_changed_in_vain(kind):
    make, paths = CHANGED[kind]
    text = (
        r"`apply\(use\)` must not change a module that it is given: the change would "
    )
    with pytest.raises(TypeError, match=text + f"be lost. Got .*{paths}.*" + REMEDY):
        autograd.apply(use, autograd.variable(jnp.float32(2.0)), make(), inputs())


def test_a_module_that_only_reads_its_state_is_an_input():
    """As layers do in evaluation."""
    module, x = Noisy(rngs()), inputs()
    module(x)
    module.eval()
    w = autograd.variable(jnp.float32(2.0))
    y = autograd.apply(use, w, module, x)
    np.testing.assert_allclose(y.value, 2 * module(x), rtol=1e-5, atol=1e-6)


def test_a_module_that_is_returned_may_be_changed():
    module, x = nnx.BatchNorm(3, rngs=rngs()), inputs()
    w = autograd.variable(jnp.float32(2.0))

    def run(w, module, x):
        return module(x) * w, module

    for _ in range(2):
        _, module = autograd.apply(run, w, module, x)
    expected = nnx.BatchNorm(3, rngs=rngs())
    expected(x)
    expected(x)
    np.testing.assert_allclose(module.mean[...], expected.mean[...], rtol=1e-5)


def test_flax_is_not_imported():
    program = (
        "import sys; from jdist import autograd; w = autograd.variable(1.0); "
        "autograd.apply(abs, w); sys.exit('flax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
