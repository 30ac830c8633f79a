"""Decisions that are tapped as integers: which expert, which order."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdist import verify
from tests.verify.test_decisions import EXPERTS, TIED, among, planted, problem

EXAMPLES = 24


def routed(params, x, turned=(), layers=1):
    """A top-2 mixture with its routes tapped; a tied or clear one may be turned."""
    h, total = x, 0
    for _ in range(layers):
        h = verify.tap(jnp.tanh(h @ params["w"]), "hidden")
        probs = jax.nn.softmax(h @ params["router"], -1)
        _, best = lax.top_k(probs, 3)
        second = jnp.where(among(x, turned), best[:, 2], best[:, 1])
        two = verify.tap(jnp.stack([best[:, 0], second], 1), "route")
        gates = probs * jax.nn.one_hot(two, EXPERTS, dtype=h.dtype).sum(1)
        gates = verify.tap(gates, "gates")
        total += (jnp.einsum("be,be->b", gates, h @ params["experts"]) - 1) ** 2
        h = h[:, : x.shape[1]]
    return total


def micro(turned=(), times=1.0, layers=1, wrap=lambda f: f):
    """Three micro-batches in another order than the batch has."""

    def loss(params, x):
        return wrap(lambda p, x: routed(p, x, turned, layers))(params, x).mean()

    part = jax.jit(jax.value_and_grad(loss))

    def run(params, x):
        found = [part(params, own) for own in (x[8:16], x[:8], x[16:])]
        return jax.tree.map(lambda *leaves: sum(leaves) * times / 3, *found)

    return run


@pytest.fixture
def tied(rng):
    """A problem with few experts for its examples, one of which has a tie."""
    params, x = problem(rng, examples=EXAMPLES)
    return planted(params, x, 1), x


def test_a_route_within_rounding_is_taken_and_a_clear_one_is_named(tied):
    """Though every route that is taken is another example's right one."""
    params, x = tied
    judge = verify.trace_judge(routed, params, x, finite_differences=False)
    note = (
        f"examples {TIED} have decisions within rounding: their taps are not compared"
    )
    right = judge(micro())
    assert right.ok
    assert note not in right.notes
    assert "forward route" in right.right
    other = judge(micro([x[TIED, -1]]))
    assert other.ok, str(other)
    assert other.difference is None
    assert note in other.notes
    for clear, *others in ([9], [9, TIED], [20, TIED]):
        found = judge(micro(x[jnp.array([clear, *others]), -1]))
        assert not found.ok
        difference = found.difference
        assert (difference.direction, difference.tap) == ("forward", "route"), str(
            found
        )
        assert difference.examples == (clear,)
        assert f"of example {clear};" in difference.words
    # The choice is right, and what comes behind it is wrong.
    sign = judge(micro([x[TIED, -1]], -1.0))
    assert sign.report.failures
    assert sign.difference.direction != "forward", str(sign)


def test_routes_of_several_layers_and_of_recomputations(rng):
    params, x = problem(rng, examples=EXAMPLES)

    def loss(params, x):
        return routed(params, x, layers=2)

    judge = verify.trace_judge(loss, params, x, finite_differences=False)
    for wrap in (lambda f: f, jax.checkpoint):
        right = judge(micro(layers=2, wrap=wrap))
        assert right.ok
        assert right.difference is None, str(right)
        wrong = judge(micro([x[9, -1]], layers=2, wrap=wrap))
        assert wrong.difference.tap == "route[0]", str(wrong)
        assert wrong.difference.examples == (9,)


def balanced(params, x, turned=(), part=lambda load: load):
    """A scalar loss: the mixture's, and the load of its experts over the batch."""
    h = verify.tap(jnp.tanh(x @ params["w"]), "hidden")
    probs = verify.tap(jax.nn.softmax(h @ params["router"], -1), "probabilities")
    _, best = lax.top_k(probs, 3)
    second = jnp.where(among(x, turned), best[:, 2], best[:, 1])
    two = verify.tap(jnp.stack([best[:, 0], second], 1), "route")
    chosen = jax.nn.one_hot(two, EXPERTS, dtype=h.dtype).sum(1)
    mask = verify.tap(chosen > 0, "mask")
    gates = verify.tap(jnp.where(mask, probs, 0), "gates")
    out = verify.tap(jnp.einsum("be,be->b", gates, h @ params["experts"]), "out")
    share = lax.stop_gradient(chosen.mean(0))
    load = verify.tap((share * probs.mean(0)).sum(), "load")
    return ((out - 1) ** 2).mean() + part(load)


@jax.custom_vjp
def halved(x):
    """The identity, with half of the derivative."""
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def test_in_a_loss_over_the_batch_a_near_route_is_no_fault_and_hides_none(tied):
    """Another route of one example changes the cotangents of all."""
    params, x = tied
    judge = verify.trace_judge(balanced, params, x, finite_differences=False)

    def asked(*turned, **options):
        names = x[jnp.array(turned, int), -1]
        return judge(
            jax.jit(jax.value_and_grad(lambda p, x: balanced(p, x, names, **options)))
        )

    right = asked()
    assert right.ok, str(right)
    assert right.difference is None
    other = asked(TIED)
    assert other.ok, str(other)
    assert other.difference is None, str(other)
    note = f"examples {TIED} have decisions within rounding"
    assert any(note in each for each in other.notes)
    assert "forward route" in other.right
    for clear in (9, 20):
        for turned in ([clear], [clear, TIED]):
            found = asked(*turned)
            assert found.report.failures, str(found)
            assert (found.difference.direction, found.difference.tap) == (
                "forward", "route",
            ), str(found)  # fmt: skip
            assert found.difference.examples == (clear,)
    for turned in ([], [TIED]):
        found = asked(*turned, part=halved)
        assert found.report.failures, str(found)
        # The load's own value is the tie's.
        assert (found.difference.direction, found.difference.tap) == (
            "backward", "probabilities",
        )  # fmt: skip
        words = "its part through load is 0.5 times"
        assert turned or words in found.difference.words


def test_integers_in_an_update_are_no_values_of_their_own():
    """A count that is tapped with the rest of a state is judged as a leaf."""

    def update(w, g, s):
        s = verify.tap({"count": s["count"] + 1, "m": 0.9 * s["m"] + g}, "moments")
        return w - 0.1 * s["m"], s

    def loss(w, x):
        return (x @ w) ** 2

    def step(w, s, x, off=0):
        found = jax.grad(lambda w: loss(w, x).mean())(w)
        w, s = update(w, found, s)
        return w, {**s, "count": s["count"] + off}

    x = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3) / 7
    w = jnp.ones(3, jnp.float32)
    start = w, {"count": jnp.int32(0), "m": jnp.zeros(3, jnp.float32)}
    given = {"right": step, "off": lambda w, s, x: step(w, s, x, 1)}
    report = verify.step(loss, update, start, [x, 2 * x], given)
    assert report.of("right").ok, str(report)
    assert {row.path for row in report.of("off").failures} == {"state/count"}
