"""Groups of parameters: each has its own optimizer, found by label."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdist import optim

PARAMS = {
    "dense": {"w": jnp.array([[1.0, -2.0, 0.5]]), "b": jnp.array([0.3, 0.1])},
    "n": jnp.array(3),
    "scale": jnp.array(2.0),
}
GRADS = {
    "dense": {"w": jnp.array([[0.2, 3.0, -1e-3]]), "b": jnp.array([-0.7, 0.4])},
    "n": None,
    "scale": jnp.array(-5.0),
}


def labels_of(params):
    """No decay on biases and scales."""
    return jax.tree.map(lambda p: "decay" if p.ndim > 1 else "plain", params)


def grouped(labels=labels_of):
    return optim.by_label(
        {
            "decay": optim.adamw(lr=0.1, weight_decay=0.5),
            # Dampened, and so with a count.
            "plain": optim.sgd(lr=0.01, momentum=0.9, dampening=0.5),
        },
        labels,
    )


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("labels", [labels_of, labels_of(PARAMS)])
def test_each_leaf_moves_as_with_its_own_optimizer(labels):
    opt = grouped(labels)
    decay, plain = (
        optim.adamw(lr=0.1, weight_decay=0.5),
        optim.sgd(lr=0.01, momentum=0.9, dampening=0.5),
    )
    params, state = PARAMS, opt.init(PARAMS)
    w, w_state = PARAMS["dense"]["w"], decay.init(PARAMS["dense"]["w"])
    rest = (PARAMS["dense"]["b"], PARAMS["scale"])
    rest_state = plain.init(rest)
    for _ in range(3):
        params, state = opt.step(params, GRADS, state)
        w, w_state = decay.step(w, GRADS["dense"]["w"], w_state)
        rest, rest_state = plain.step(
            rest, (GRADS["dense"]["b"], GRADS["scale"]), rest_state
        )
    assert bits(params) == bits(
        {"dense": {"w": w, "b": rest[0]}, "n": 3, "scale": rest[1]}
    )
    assert bits(state) == bits({"decay": w_state, "plain": rest_state})


def test_none_skips_in_each_group_and_jit_agrees():
    opt = grouped()
    grads = {"dense": {"w": None, "b": GRADS["dense"]["b"]}, "n": None, "scale": None}
    state = opt.init(PARAMS)
    new, new_state = opt.step(PARAMS, grads, state)
    assert bits(new["dense"]["w"]) == bits(PARAMS["dense"]["w"])
    assert bits(new["scale"]) == bits(PARAMS["scale"])
    assert bits(new_state["decay"]) == bits(state["decay"])
    assert new_state["plain"]["dense"]["b"].step == 1
    assert new_state["plain"]["scale"].step == 0
    compiled = jax.jit(opt.step)(PARAMS, grads, state)
    # One multiply-add fused per element.
    for a, b in zip(*map(jax.tree.leaves, (compiled, (new, new_state))), strict=True):
        np.testing.assert_allclose(a, b, rtol=4 * 2.0**-53)


def test_overrides_go_to_all_who_have_them_or_to_one_label():
    opt, state = grouped(), grouped().init(PARAMS)

    def moved(**overrides):
        new, _ = opt.step(PARAMS, GRADS, state, **overrides)
        return {k: bits(new["dense"][k]) != bits(PARAMS["dense"][k]) for k in "wb"}

    assert moved() == {"w": True, "b": True}
    assert moved(lr=0.0) == {"w": False, "b": False}
    assert moved(lr={"decay": 0.0}) == {"w": False, "b": True}
    assert moved(lr={"plain": 0.0}) == {"w": True, "b": False}
    undecayed = optim.adamw(lr=0.1, weight_decay=0.0)
    w, g = PARAMS["dense"]["w"], GRADS["dense"]["w"]
    new, _ = opt.step(PARAMS, GRADS, state, weight_decay=0.0)
    assert bits(new["dense"]["w"]) == bits(undecayed.step(w, g, undecayed.init(w))[0])


def test_an_optax_group_beside_one_of_ours():
    """Only the optax group refuses None; a label without parameters is no error."""
    opt = optim.by_label(
        {
            "decay": optim.from_optax(optax.lion(0.1)),
            "plain": optim.sgd(lr=0.5),
            "unused": optim.adam(),
        },
        labels_of,
    )
    state = opt.init(PARAMS)
    new, _ = opt.step(PARAMS, GRADS | {"scale": None}, state)
    assert bits(new["scale"]) == bits(PARAMS["scale"])
    np.testing.assert_allclose(
        new["dense"]["w"],
        PARAMS["dense"]["w"] - 0.1 * np.sign(GRADS["dense"]["w"]),
        rtol=0.002,  # lion decays by 1e-3 * lr besides
    )
    without = GRADS | {"dense": {"w": None, "b": None}}
    with pytest.raises(ValueError, match="Got None at dense/w"):
        opt.step(PARAMS, without, state)


def test_refusals():
    ours = {"a": optim.sgd()}
    with pytest.raises(ValueError, match=r"optimizers=...\)` must have at least one"):
        optim.by_label({}, "a")
    scaled = optim.with_master_weights(optim.sgd(), loss_scale=8.0)
    with pytest.raises(ValueError, match=r"no loss scale of its own at 'a'.*around"):
        optim.by_label({"a": scaled}, "a")
    opt = optim.by_label(ours, {"w": "a"})
    with pytest.raises(ValueError, match=r"labels=...\)` must have the structure of"):
        opt.init({"w": jnp.zeros(2), "b": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"labels of optimizers, a. Got c\."):
        optim.by_label(ours, {"w": "c"}).init({"w": jnp.zeros(2)})
    params = {"w": jnp.zeros(2)}
    with pytest.raises(TypeError, match=r"'eps' to override in any.*There are lr"):
        opt.step(params, params, opt.init(params), eps=1.0)
    with pytest.raises(ValueError, match=r"lr=...\)` must name labels that have it, a"):
        opt.step(params, params, opt.init(params), lr={"b": 1.0})
    with pytest.raises(ValueError, match=r"state=...\)` must be what `init` or"):
        opt.step(params, params, {"b": None})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A module that is a tree and may be called."""

    w: object
    b: object

    def __call__(self, x):
        return x @ self.w + self.b


def test_labels_in_a_module_that_may_be_called():
    """A tree with texts for leaves is a tree; a function without leaves is one."""
    params = Layer(jnp.array([[1.0, 2.0]]), jnp.array([3.0, 4.0]))
    groups = {"fast": optim.sgd(lr=0.5), "slow": optim.sgd(lr=0.1)}
    tree = Layer("fast", "slow")
    for labels in (tree, lambda _: tree, jax.tree_util.Partial(lambda _: tree)):
        opt = optim.by_label(groups, labels)
        new, _ = opt.step(params, params, opt.init(params))
        np.testing.assert_allclose(new.w, [[0.5, 1.0]], rtol=1e-6)
        np.testing.assert_allclose(new.b, [2.7, 3.6], rtol=1e-6)


def test_labels_of_a_flax_state():
    """Made by `jax.tree.map` of a state, whose variables then hold the labels."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    labels = jax.tree.map(
        lambda x: "fast" if x.ndim > 1 else "slow", nnx.state(model, nnx.Param)
    )
    groups = {"fast": optim.sgd(lr=0.5), "slow": optim.sgd(lr=0.0)}
    opt = optim.by_label(groups, labels)
    trained = nnx.Optimizer(model, optim.as_optax(opt), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    x = jnp.arange(6.0, dtype=jnp.float32).reshape(2, 3)
    trained.update(model, nnx.grad(lambda m: (m(x) ** 2).sum())(model))
    assert not np.allclose(model.kernel[...], before["kernel"][...])
    with pytest.raises(ValueError, match="must hold labels of optimizers, fast, slow"):
        optim.by_label(groups, {"w": ["fast", "slow"]}).init({"w": jnp.ones(2)})


def test_a_label_may_stand_for_a_subtree():
    """In dicts, and where a state of Flax has labels in the place of its variables."""
    params = {"body": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "head": jnp.ones(5)}
    groups = {"fast": optim.sgd(lr=0.5), "slow": optim.sgd(lr=0.25)}
    opt = optim.by_label(groups, {"body": "slow", "head": "fast"})
    new, _ = opt.step(params, params, opt.init(params))
    np.testing.assert_array_equal(new["body"]["w"], 0.75)
    np.testing.assert_array_equal(new["body"]["b"], 0.75)
    np.testing.assert_array_equal(new["head"], 0.5)
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    labels = nnx.map_state(
        lambda path, _: "fast" if path[-1] == "kernel" else "slow", state
    )
    opt = optim.by_label(groups, labels)
    new, _ = opt.step(state, state, opt.init(state))
    np.testing.assert_array_equal(new["kernel"][...], 0.5 * state["kernel"][...])


def test_a_label_without_a_hash_is_refused():
    """As a variable of Flax whose class promises one."""

    class Variable(str):
        __slots__ = ()

        def __hash__(self):
            raise TypeError("unhashable type: 'Param'")

    groups = {"fast": optim.sgd(lr=0.5)}
    with pytest.raises(ValueError, match="must hold labels of optimizers, fast"):
        optim.by_label(groups, {"w": Variable("fast")}).init({"w": jnp.ones(2)})
