"""Losses with a term that belongs to parts of the batch: a mixture of experts' load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.verify import tap

EXAMPLES, PARTS, EXPERTS, WIDTH = 10, 5, 3, 4


def parameters():
    rng = np.random.default_rng(3)
    shapes = {"router": (WIDTH, EXPERTS), "experts": (EXPERTS, WIDTH), "in": (7, WIDTH)}
    return {n: jnp.asarray(rng.normal(size=s), "f4") for n, s in shapes.items()}


def batch():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(EXAMPLES, 2, 7)), rng.normal(size=(EXAMPLES, 2))
    return {"x": jnp.asarray(x, "f4"), "y": jnp.asarray(y, "f4")}


def mixture(p, b, plant=lambda name, x: x):
    """The examples' losses, and the load of the part that they are."""
    hidden = tap(jnp.tanh(b["x"] @ p["in"]), "hidden")
    gates = tap(plant("gates", jax.nn.softmax(hidden @ p["router"])), "gates")
    out = tap((gates * (hidden @ p["experts"].T)).sum(-1), "out")
    load = EXPERTS * (gates.mean((0, 1)) ** 2).sum()
    return plant("losses", ((out - b["y"]) ** 2).sum(1)), plant("load", load)


def loss(p, b):
    """What is claimed: the mean over examples, and the mean over parts."""
    of_examples, loads = verify.in_parts(mixture, PARTS)(p, b)
    return of_examples.mean() + 0.3 * loads.mean()


def trainer(plant=lambda part, name, x: x):
    """Micro-batches of two examples, whose gradients are averaged."""

    def candidate(params, rows):
        found = []
        for part in range(PARTS):
            few = jax.tree.map(lambda x, i=part: x[2 * i : 2 * i + 2], rows)

            def own(p, few=few, part=part):
                each, load = mixture(p, few, lambda name, x: plant(part, name, x))
                return each.mean() + 0.3 * load

            found.append(jax.value_and_grad(own)(params))
        return jax.tree.map(lambda *x: sum(x) / PARTS, *found)

    return candidate


@pytest.fixture(scope="module")
def judge():
    return verify.trace_judge(loss, parameters(), batch(), finite_differences=False)


def test_a_right_trainer_of_parts_is_compared_by_example(judge):
    """No value is of the whole batch alone, and no note says so."""
    found = judge(trainer())
    assert found.ok
    assert found.difference is None
    taps = ["hidden", "gates", "out"]
    assert [*found.right] == [
        *(f"forward {x}" for x in taps), *(f"backward {x}" for x in taps[::-1])
    ]  # fmt: skip
    assert found.notes == ()


@pytest.mark.parametrize(
    ("plant", "place", "words"),
    [
        (lambda part, name, x: x * 1.1 if (part, name) == (2, "gates") else x,
         ("forward", "gates", (4, 5)), "1.1 times"),
        (lambda _, name, x: x * 4 if name == "load" else x,
         ("backward", "gates", tuple(range(EXAMPLES))), ""),
        (lambda part, name, x: x * 0 if (part, name) == (1, "load") else x,
         ("backward", "gates", (2, 3)), ""),
        (lambda part, name, x: jax.lax.stop_gradient(x)
         if (part, name) == (3, "load") else x,
         ("backward", "gates", (6, 7)), ""),
    ],
    ids=["gates", "load in full", "no load", "no gradient of a load"],
)  # fmt: skip
def test_examples_of_the_wrong_part_are_named(judge, plant, place, words):
    found = judge(trainer(plant))
    assert not found.ok
    own = found.difference
    assert (own.direction, own.tap, own.examples) == place
    assert words in own.words


# --- a tapped load ---


def routed(p, b, share=lambda x: x):
    """The examples' losses, and the load of their part, which is tapped."""
    hidden = tap(jnp.tanh(b["x"] @ p["in"]), "hidden")
    gates = jax.nn.softmax(tap(hidden @ p["router"], "router"))
    out = (gates * (hidden @ p["experts"].T)).sum(-1)
    load = EXPERTS * (gates.mean((0, 1)) ** 2).sum()
    return tap(((out - b["y"]) ** 2).sum(1), "losses"), share(tap(load, "load"))


def of_parts(p, b):
    of_examples, loads = verify.in_parts(routed, PARTS)(p, b)
    return of_examples.mean() + 0.3 * loads.mean()


def of_the_batch(p, b):
    of_examples, load = routed(p, b)
    return of_examples.mean() + 0.3 * load


@jax.custom_vjp
def thrice(x):
    """The identity, with three times the derivative."""
    return x


thrice.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


def micro_batches(scale=1.0, **change):
    """A trainer that differentiates the sum of the micro-batches' losses."""

    def candidate(params, rows):
        def own(p, few):
            each, load = routed(p, few, **change)
            return scale * (each.sum() / EXAMPLES + 0.3 * load / PARTS)

        few = jax.tree.map(lambda x: x.reshape(PARTS, -1, *x.shape[1:]), rows)
        step = jax.jit(jax.value_and_grad(own))
        found = [step(params, jax.tree.map(lambda x, i=i: x[i], few))
                 for i in range(PARTS)]  # fmt: skip
        return jax.tree.map(lambda *x: sum(x) / scale, *found)

    return candidate


@pytest.fixture(scope="module")
def of_loads():
    return verify.trace_judge(
        of_parts, parameters(), batch(), finite_differences=False
    )  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_load_of_each_part_is_compared(of_loads, scale):
    """Whatever factor all losses have until the gradient is divided by it."""
    found = of_loads(micro_batches(scale))
    assert found.ok
    assert found.difference is None
    assert found.notes == ()
    assert {"forward load", "backward load"} <= set(found.right)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(
    ("share", "words"),
    [
        (thrice, "it is 3 times the reference"),
        (jax.lax.stop_gradient, "no cotangent arrives"),
    ],
)
def test_the_factor_of_a_wrong_load_is_told(of_loads, scale, share, words):
    found = of_loads(micro_batches(scale, share=share))
    assert not found.ok
    assert (found.difference.direction, found.difference.tap) == ("backward", "load")
    assert words in found.difference.words


def whole_batch(change=lambda x: x):
    """A trainer that routes twice, and whose load reaches no tap of its own."""

    def candidate(params, rows):
        def own(p):
            hidden = jnp.tanh(rows["x"] @ p["in"])
            scores = tap(hidden @ p["router"], "router")
            load = (jax.nn.softmax(scores).mean((0, 1)) ** 2).sum()
            return routed(p, rows)[0].mean() + 0.3 * change(EXPERTS * load)

        return jax.jit(jax.value_and_grad(own))(params)

    return candidate


@pytest.fixture(scope="module")
def of_one_load():
    return verify.trace_judge(
        of_the_batch, parameters(), batch(), finite_differences=False
    )


def test_a_load_that_reaches_no_tap_may_be_right(of_one_load):
    found = of_one_load(whole_batch())
    assert found.ok
    assert "backward router" in found.right


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (thrice, "its part through load is 3 times the reference"),
        (jax.lax.stop_gradient, "its part through load is absent"),
    ],
)
def test_the_part_of_a_cotangent_that_comes_through_the_load_is_told(
    of_one_load, change, words
):
    found = of_one_load(whole_batch(change))
    assert not found.ok
    assert (found.difference.direction, found.difference.tap) == ("backward", "router")
    assert found.difference.words.endswith(words)


def test_taps_of_a_keyed_loss_match_those_of_a_whole_batch():
    """The reference has one example at a time, and the trainer all of a micro-batch."""

    def noisy(w, x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        hidden = tap(jnp.tanh(jnp.where(kept, x, 0) @ w), "hidden")
        return (hidden**2).sum((1, 2))

    def of_batch(w, rows, scale):
        x, keys = rows
        kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, (1, *x.shape[1:])))(keys)
        hidden = tap(scale * jnp.tanh(jnp.where(kept[:, 0], x, 0) @ w), "hidden")
        return (hidden**2).sum()

    def candidate(scales):
        def gradient(w, rows):
            parts = [jax.tree.map(lambda x, s=s: x[s], rows) for s in
                     (slice(0, 4), slice(4, 10))]  # fmt: skip
            found = [jax.value_and_grad(of_batch)(w, *x)
                     for x in zip(parts, scales, strict=True)]  # fmt: skip
            return jax.tree.map(lambda a, b: (a + b) / EXAMPLES, *found)

        return gradient

    rows = batch()["x"], jax.random.split(jax.random.key(7), EXAMPLES)
    own = verify.trace_judge(
        verify.keyed(noisy), parameters()["in"], rows, finite_differences=False
    )
    right = own(candidate((1.0, 1.0)))
    assert right.ok
    assert (*right.right, *right.notes) == ("forward hidden", "backward hidden")
    wrong = own(candidate((1.0, 1.5))).difference
    assert (wrong.tap, wrong.examples) == ("hidden", (4, 5, 6, 7, 8, 9))
    assert "it is 1.5 times the reference" in wrong.words


def test_it_is_the_loop_over_parts():
    """Whatever comes out of the examples and of the part."""

    def fn(p, part):
        return {"x": part["x"] * p, "sums": part["x"].sum(1)}, (part["y"].sum(), p)

    rows = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.arange(6.0)}
    of_examples, (sums, params) = verify.in_parts(fn, 3)(2.0, rows)
    np.testing.assert_array_equal(of_examples["x"], 2 * rows["x"])
    np.testing.assert_array_equal(of_examples["sums"], rows["x"].sum(1))
    assert sums.tolist() == [1.0, 5.0, 9.0]
    assert params.tolist() == [2.0] * 3


def test_what_is_not_in_equal_parts_is_refused():
    with pytest.raises(
        ValueError, match=r"must be examples in 4 equal parts.*\(6, 2\)"
    ):
        verify.in_parts(mixture, 4)(None, jnp.ones((6, 2)))
    with pytest.raises(ValueError, match="must be examples in 2 equal parts"):
        verify.in_parts(mixture, 2)(None, 3.0)
    for parts in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"parts=\.\.\.\)` must be a whole number"):
            verify.in_parts(mixture, parts)
    with pytest.raises(TypeError, match=r"in_parts\(fn=\.\.\.\)"):
        verify.in_parts("mixture", 2)
