"""Decisions that rounding may turn: right programs that decide so, and faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist import VerificationError, verify
from jdist.verify.bound import RISK, choices_bound
from jdist.verify.evaluation.decisions import chosen

EXAMPLES, WIDTH, EXPERTS = 11, 5, 7
TIED = 4


def among(x, turned):
    """Whether each example is one of those named."""
    return jnp.isin(x[:, -1], jnp.asarray(turned, x.dtype))


def mixture(params, x, turned=()):
    """A top-2 mixture of experts; `turned` examples take the third for the second."""
    h = jnp.tanh(x @ params["w"])
    probs = jax.nn.softmax(h @ params["router"], -1)
    _, best = lax.top_k(probs, 3)
    second = jnp.where(among(x, turned), best[:, 2], best[:, 1])
    two = jnp.stack([best[:, 0], second], 1)
    gates = probs * jax.nn.one_hot(two, EXPERTS, dtype=h.dtype).sum(1)
    gates = verify.tap(gates, "gates")
    return (jnp.einsum("be,be->b", gates, h @ params["experts"]) - 1) ** 2


def labelled(params, x, turned=()):
    """The loss of the label that the model itself finds most probable."""
    logits = jnp.tanh(x @ params["w"]) @ params["router"]
    _, best = lax.top_k(logits, 2)
    other = jnp.where(among(x, turned), best[:, 1], best[:, 0])
    label = jnp.argmax(logits, -1).astype(jnp.int32)
    label = jnp.where(among(x, turned), other, label)
    scores = (jnp.tanh(x @ params["w"]) @ params["experts"]) ** 2
    return jnp.take_along_axis(scores, label[:, None], 1)[:, 0]


def ordered(params, x, turned=()):
    """Scores in the order of the logits, of which places count differently."""
    h = jnp.tanh(x @ params["w"])
    order = jnp.argsort(h @ params["router"], -1)
    # The tied ones are the two largest but one, as `planted` has them.
    swapped = order[:, jnp.array([0, 1, 2, 3, 5, 4, 6])]
    order = jnp.where(among(x, turned)[:, None], swapped, order)
    scores = jnp.take_along_axis(h @ params["experts"], order, 1)
    return (scores * jnp.arange(1, 8, dtype=h.dtype)[None]).sum(-1) ** 2


def problem(rng, dtype=jnp.float32, examples=EXAMPLES):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.4, dtype)

    params = {
        "experts": normal(EXPERTS, EXPERTS),
        "router": normal(EXPERTS, EXPERTS),
        "w": normal(WIDTH, EXPERTS),
    }
    x = normal(examples, WIDTH) * 2
    # The last number of an example is its name.
    return params, x.at[:, -1].set(jnp.arange(examples, dtype=dtype) / examples)


def planted(params, x, place):
    """The router with which the logits number `place` and the next of `TIED` tie."""
    w, router = (np.asarray(params[k], np.float64) for k in ("w", "router"))
    h = np.tanh(np.asarray(x[TIED], np.float64) @ w)
    order = np.argsort(-(h @ router))
    first, second = order[place : place + 2]
    gap = h @ (router[:, first] - router[:, second])
    router[:, second] += gap * h / (h @ h)
    return params | {"router": jnp.asarray(router, params["router"].dtype)}


def trainer(loss, turned=(), times=1.0):
    """A right program up to `times`; `turned` examples decide otherwise."""
    gradient = jax.jit(jax.value_and_grad(lambda p, x: loss(p, x, turned).mean()))

    def run(params, x):
        value, found = gradient(params, x)
        return value, jax.tree.map(lambda leaf: leaf * times, found)

    return run


LOSSES = {"top_k": (mixture, 1), "argmax": (labelled, 0), "sort": (ordered, 1)}


@pytest.mark.parametrize("name", LOSSES)
def test_a_planted_tie_is_judged_by_the_choice_that_was_taken(name, rng):
    """Either choice is right; one with a clear margin, a factor, a sign are not."""
    loss, place = LOSSES[name]
    params, x = problem(rng)
    params = planted(params, x, place)
    tied, clear = x[TIED, -1], x[TIED + 1, -1]
    report = verify.gradients(
        loss,
        params,
        x,
        {
            "one": trainer(loss),
            "other": trainer(loss, [tied]),
            "clear margin": trainer(loss, [clear]),
            "1.5 times": trainer(loss, [tied], 1.5),
            "sign": trainer(loss, [tied], -1.0),
        },
        finite_differences=False,
    )
    assert report.of("one").ok
    assert report.of("other").ok, report
    for wrong in ("clear margin", "1.5 times", "sign"):
        assert report.of(wrong).failures, report
    told = f"1 of {EXAMPLES} examples has a decision that rounding may turn"
    assert any(told in note and f": {TIED}." in note for note in report.notes)
    assert any("other: decides otherwise than one device" in x for x in report.notes)
    assert not any("influence each other" in note for note in report.notes)


def test_the_mean_of_both_choices_is_not_judged(rng):
    """No right program has it, though other choices explain differences as large."""
    params, x = problem(rng)
    params = planted(params, x, 1)
    one, other = trainer(mixture), trainer(mixture, [x[TIED, -1]])

    def between(params, x):
        both = one(params, x), other(params, x)
        return jax.tree.map(lambda a, b: (a + b) / 2, *both)

    report = verify.gradients(
        mixture, params, x, {"between": between}, finite_differences=False
    )
    assert not report.failures, report
    words = f"1 of {EXAMPLES} examples has a decision that rounding may turn (top_k)"
    gradient = [row for row in report.leaves if row.path != "(loss)"]
    assert all(row.unjudged.startswith(words) for row in gradient), report
    with pytest.raises(VerificationError, match="other choices explain differences"):
        report.raise_if_failed()


def test_many_undecided_examples_are_counted(rng):
    """Choices of more than a few are not read off, and a factor is still wrong."""
    params, x = problem(rng)
    # Nothing but the names differs between the copies of the tied example.
    params = planted(params | {"w": params["w"].at[-1].set(0)}, x, 1)
    names, copies = jnp.arange(17, dtype=x.dtype) / 17, jnp.stack([x[TIED]] * 12)
    x = jnp.concatenate([copies, x[:TIED], x[-1:]]).at[:, -1].set(names)
    report = verify.gradients(
        mixture,
        params,
        x,
        {
            "one": trainer(mixture),
            "nine": trainer(mixture, names[:9]),
            "clear margin": trainer(mixture, names[12:13]),
            "sign": trainer(mixture, names[:9], -1.0),
        },
        finite_differences=False,
    )
    assert report.of("one").ok
    assert not report.of("nine").failures, report
    words = "12 of 17 examples have decisions that rounding may turn (top_k)"
    assert all(row.unjudged.startswith(words) for row in report.of("nine").unjudged)
    assert any(f"{words}: 0, 1, 2, 3, 4, 5, ..." in note for note in report.notes)
    assert report.of("clear margin").failures, report
    assert report.of("sign").failures, report


def test_a_trace_names_the_tap_of_a_choice_with_a_clear_margin(rng):
    """And it says of a right choice that its example's taps are not compared."""
    params, x = problem(rng)
    params = planted(params, x, 1)
    judge = verify.trace_judge(mixture, params, x, finite_differences=False)
    right = judge(trainer(mixture, [x[TIED, -1]]))
    assert right.ok, right
    assert right.difference is None
    words = f"examples {TIED} have decisions within rounding: their taps are not"
    assert any(words in note for note in right.notes)
    wrong = judge(trainer(mixture, [x[TIED + 1, -1]]))
    assert wrong.report.failures
    found = wrong.difference
    assert (found.direction, found.tap) == ("forward", "gates")
    assert found.examples == (TIED + 1,)


def test_a_scalar_loss_has_a_tie_too(rng):
    """Examples are not seen, but other choices of the batch are."""
    params, x = problem(rng)
    params = planted(params, x, 1)
    report = verify.gradients(
        lambda p, x: mixture(p, x).mean(),
        params,
        x,
        {
            "other": trainer(mixture, x[TIED : TIED + 1, -1]),
            "sign": trainer(mixture, (), -1.0),
        },
        finite_differences=False,
    )
    assert not report.of("other").failures, report
    assert report.of("sign").failures, report
    assert any("there are decisions that rounding may turn" in x for x in report.notes)


def test_a_bfloat16_mixture_in_two_halves_is_not_condemned(rng):
    """The router's products in two halves decide some of many examples otherwise."""
    params, x = problem(rng, jnp.bfloat16, 257)

    def halves(params, x):
        h = jnp.tanh(x @ params["w"])
        r = params["router"]
        logits = h[:, :3] @ r[:3] + h[:, 3:] @ r[3:]
        probs = jax.nn.softmax(logits, -1)
        _, best = lax.top_k(probs, 2)
        gates = probs * jax.nn.one_hot(best, EXPERTS, dtype=h.dtype).sum(1)
        return (jnp.einsum("be,be->b", gates, h @ params["experts"]) - 1) ** 2

    gradient = jax.jit(jax.value_and_grad(lambda p, x: halves(p, x).mean()))
    report = verify.gradients(
        mixture,
        params,
        x,
        {"halves": gradient, "sign": trainer(mixture, (), -1.0)},
        finite_differences=False,
    )
    assert not report.of("halves").failures, report
    assert len(report.of("sign").failures) == 3, report
    assert any("examples have decisions that rounding" in note for note in report.notes)


def test_kinks_are_no_decisions(rng):
    """A wrong gradient of a ReLU network fails as before, and no note tells of ties."""
    params, x = problem(rng)

    def loss(params, x, turned=()):
        return (jax.nn.relu(x @ params["w"]) @ params["router"]).max(-1) ** 2

    wrong = verify.gradients(
        loss,
        params,
        x,
        {"one": trainer(loss), "twice": trainer(loss, (), 2.0)},
        finite_differences=False,
    )
    assert wrong.of("one").ok
    assert len(wrong.of("twice").failures) == 2
    assert not any("rounding may turn" in note for note in wrong.notes)


def test_the_bound_of_choices_is_the_sum_of_few_and_less_of_many():
    """Of few examples all may differ; of many, hardly more than were seen to."""
    assert choices_bound(1, 8, 3.0, 1.0, 0.0) == 3.0
    many = choices_bound(1, 8, 1000.0, 1.0, 5.0)
    assert 20 < many < 60
    # Bernstein's own numbers: deviations of the normal limit where there are many.
    lots = choices_bound(1, 10**6, 1e9, 1.0, 1e6)
    normal = np.sqrt(4 * 1e6 * np.log(2 / RISK))
    assert normal < lots < 1.01 * normal


def test_choices_are_read_off_a_difference(rng):
    """Exactly those that were taken, by the reference or by the candidate."""
    bounds = {0: np.full((), 1e-6), 1: np.full((5, 7), 1e-6)}
    examples = {
        n: [{0: rng.normal(), 1: rng.normal(size=(5, 7))} for _ in range(2)]
        for n in (2, 5, 7)
    }
    errors = {
        i: examples[2][1][i] - examples[7][0][i] + 1e-7 * rng.uniform(-1, 1)
        for i in range(2)
    }
    taken, moves = chosen(errors, bounds, examples)
    assert taken == [2, 7]
    assert np.abs(errors[1] - moves[1]).max() < 1e-6
    assert chosen({i: x * 1.001 for i, x in errors.items()}, bounds, examples) is None
    # Of results that are not shown the changes are known, too.
    taken, moves = chosen({1: errors[1]}, {1: bounds[1]}, examples)
    assert (taken, sorted(moves)) == ([2, 7], [0, 1])
    assert abs(errors[0] - moves[0]) < 1e-6
