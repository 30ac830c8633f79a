"""A gradient that counts some uses of a parameter too often, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.verify.explanations.uses import MOST, uses_counted

RNG = np.random.default_rng(11)
TABLE = jnp.asarray(RNG.normal(size=(7, 3)), jnp.float32)
MIX = jnp.asarray(RNG.normal(size=(3, 3)), jnp.float32)
PARAMS = {"a": None, "mix": MIX, "table": TABLE, "unused": jnp.ones(2, jnp.float32)}
TOKENS = jnp.asarray(RNG.integers(0, 7, (5, 4)))


def losses(params, tokens, embedding=None, head=None):
    """The table at both ends; the matrix twice, once behind a derivative of its own."""
    embedding = params["table"] if embedding is None else embedding
    head = params["table"] if head is None else head
    h = jax.nn.relu(embedding[tokens] @ params["mix"])
    h = jnp.tanh(h @ params["mix"].T)
    return jax.nn.logsumexp(h @ head.T, axis=-1).sum(-1)


def ends():
    """The loss, and the gradients of the table at either end."""

    def loss(embedding, head):
        return losses(PARAMS, TOKENS, embedding, head).mean()

    return jax.value_and_grad(loss, (0, 1))(TABLE, TABLE)


def judged(table):
    """The report of a gradient that has this one for the table."""
    loss, right = jax.value_and_grad(lambda p: losses(p, TOKENS).mean())(PARAMS)
    wrong = {"wrong": lambda params, tokens: (loss, right | {"table": table})}
    return verify.gradients(losses, PARAMS, TOKENS, wrong, finite_differences=False)


@pytest.mark.parametrize(
    ("embedding", "head", "words"),
    [
        (1, 0, "gather once, dot_general 0 times"),
        (0, 1, "gather 0 times, dot_general once"),
        (1, 2, "gather once, dot_general 2 times"),
        (0.5, 1, "gather 0.5 times, dot_general once"),
        (1, -1, "gather once, dot_general -1 times"),
    ],
)
def test_uses_that_are_missing_or_doubled_are_named(embedding, head, words):
    _, (first, last) = ends()
    report = judged(embedding * first + head * last)
    assert [leaf.path for leaf in report.failures] == ["table"]
    assert f"wrong: table: the uses that it counts: {words}" in report.notes


def test_each_candidate_and_leaf_has_its_own_words():
    """A right candidate and a leaf that is missing have none."""
    _, (first, last) = ends()
    loss, right = jax.value_and_grad(scalar)(PARAMS)
    given = {
        "right": right,
        "first": right | {"table": first},
        "last": right | {"table": last, "mix": None},
    }
    candidates = {name: lambda *_, g=grads: (loss, g) for name, grads in given.items()}
    report = verify.gradients(
        losses, PARAMS, TOKENS, candidates, finite_differences=False
    )
    assert [note for note in report.notes if "uses" in note] == [
        "first: table: the uses that it counts: gather once, dot_general 0 times",
        "last: table: the uses that it counts: gather 0 times, dot_general once",
    ]


def test_another_error_is_no_matter_of_uses():
    _, (first, last) = ends()
    noise = jnp.asarray(RNG.normal(size=TABLE.shape), jnp.float32)
    for table in (2 * (first + last), first + last + 1e-2 * noise, jnp.flip(first)):
        report = judged(table)
        assert not report.ok
        assert not any("uses" in note for note in report.notes)


def scalar(params):
    return losses(params, TOKENS).mean()


def test_a_right_gradient_counts_each_use_once():
    right = jax.grad(scalar)(PARAMS)
    for name in ("table", "mix"):
        assert uses_counted(scalar, PARAMS, {name: np.asarray(right[name])}) == {}


def test_one_use_or_none_explains_nothing():
    def once(params):
        return (params["mix"] ** 2).sum()

    for name in ("mix", "unused"):
        wrong = np.asarray(PARAMS[name]) + 1
        assert uses_counted(once, PARAMS, {name: wrong}) == {}


def test_uses_of_one_kind_are_numbered():
    """The transposed one, too: what passes a parameter on is no use."""

    def twice(first, second):
        own = {"mix": first, "table": TABLE}
        h = jax.nn.relu(TABLE[TOKENS] @ own["mix"])
        return (
            jax.nn.logsumexp(jnp.tanh(h @ second.T) @ TABLE.T, axis=-1).sum(-1).mean()
        )

    first, _ = jax.grad(twice, (0, 1))(MIX, MIX)
    words = uses_counted(scalar, PARAMS, {"mix": np.asarray(first)})["mix"]
    assert words == "dot_general (1) once, dot_general (2) 0 times"


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_uses_inside_of_calls_are_told_apart(wrap):
    def loss(params):
        h = wrap(lambda table: table[TOKENS].sum(1))(params["table"])
        return jnp.sin(h @ params["table"].T).sum()

    def parts(embedding, head):
        return jnp.sin(embedding[TOKENS].sum(1) @ head.T).sum()

    _, last = jax.grad(parts, (0, 1))(TABLE, TABLE)
    words = uses_counted(loss, PARAMS, {"table": np.asarray(last)})["table"]
    assert words == "gather 0 times, dot_general once"


def test_a_loop_and_a_function_with_its_own_derivative_are_one_use_each():
    """What has no gradient is none."""

    @jax.custom_vjp
    def doubled(table):
        return table.sum(1)

    doubled.defvjp(
        lambda table: (table.sum(1), None),
        lambda _, g: (jnp.broadcast_to(2 * g[:, None], TABLE.shape),),
    )

    def loss(params):
        def turn(h, token):
            h = jnp.tanh(h + params["table"][token])
            h = jnp.where(params["table"].sum() > 0, h, -h)
            return h, h @ params["table"].sum(0)

        _, found = jax.lax.scan(turn, jnp.ones(3, jnp.float32), TOKENS[0])
        still = jax.lax.stop_gradient(params["table"]).max()
        return found.sum() + (doubled(params["table"]) ** 2).sum() + still

    right = np.asarray(jax.grad(loss)(PARAMS)["table"])
    rule = 4 * np.asarray(TABLE.sum(1))[:, None] * np.ones((1, 3))
    words = uses_counted(loss, PARAMS, {"table": right - rule})["table"]
    assert words == "scan once, custom_vjp_call 0 times"


def test_uses_whose_gradients_are_alike_are_not_told_apart():
    def loss(params):
        return (params["table"] + params["table"]).sum()

    assert uses_counted(loss, PARAMS, {"table": np.ones((7, 3))}) == {}


def test_many_uses_are_not_told_apart():
    def loss(params):
        return sum(jnp.sin(k * params["mix"]).sum() for k in range(1, MOST + 2))

    wrong = np.asarray(jax.grad(loss)(PARAMS)["mix"] - jnp.cos(MIX))
    assert uses_counted(loss, PARAMS, {"mix": wrong}) == {}
