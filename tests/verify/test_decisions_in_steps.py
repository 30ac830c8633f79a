"""Decisions that rounding may turn, in whole steps and in an optimizer's drift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist import optim, verify
from tests.verify.test_decisions import (
    EXAMPLES,
    EXPERTS,
    TIED,
    among,
    mixture,
    planted,
    problem,
    trainer,
)

OTHERWISE = "decides otherwise than one device, within rounding"


@pytest.fixture
def tied(rng):
    """Parameters and a batch of which one example's second and third expert tie."""
    params, x = problem(rng)
    return planted(params, x, 1), x


def candidates(step, x):
    """Right steps by either choice, and wrong ones, by what they are."""
    names = {"one": (), "other": [x[TIED, -1]], "clear margin": [x[TIED + 1, -1]]}
    found = {name: step(turned) for name, turned in names.items()}
    return found | {"1.5 times": step(names["other"], 1.5)}


def check(report, part):
    """Either choice passes, in all steps, and each fault is found in the first one."""
    assert report.of("one").ok, str(report.of("one"))
    assert report.of("other").ok, str(report.of("other"))
    assert any(f"step 1: other {OTHERWISE}" in note for note in report.notes)
    assert not any("one decides" in note for note in report.notes)
    for wrong in ("clear margin", "1.5 times"):
        assert report.of(wrong).failures, wrong
    causes = {x.candidate: (x.step, x.part) for x in report.attributions}
    assert causes == {"clear margin": (1, part), "1.5 times": (1, part)}


@pytest.mark.parametrize("shown", [True, False], ids=["gradient", "parameters"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_is_judged_by_the_choice_that_was_taken(name, shown, tied):
    """Whether the gradient is shown or not; the second step begins where it led to."""
    params, x = tied
    opt = {"sgd": optim.sgd(lr=0.1), "adam": optim.adam(lr=0.01)}[name]

    def step(turned, times=1.0):
        gradient = trainer(mixture, turned, times)

        def run(p, s, x):
            found = gradient(p, x)[1]
            new = opt.step(p, found, s)
            return verify.Trained(*new, gradient=found) if shown else new

        return run

    start = params, opt.init(params)
    report = verify.step(mixture, opt.step, start, [x, 0.7 * x], candidates(step, x))
    unknown = "gradient or optimizer update"
    check(report, "gradient" if shown or name == "adam" else unknown)
    words = f"1 of {EXAMPLES} examples has a decision that rounding may turn (top_k)"
    assert any(words in note for note in report.notes)


def test_a_step_that_is_one_function_has_a_tie_too(tied):
    """Its choices are changes of the whole state."""
    params, x = tied
    opt = optim.sgd(lr=0.1, momentum=0.9)

    def step(turned, times=1.0):
        gradient = trainer(mixture, turned, times)
        return lambda state, x: opt.step(state[0], gradient(state[0], x)[1], state[1])

    judge = verify.step_judge(step(()), (params, opt.init(params)), [x, 0.7 * x])
    check(judge(candidates(step, x)), "gradient or optimizer update")


def test_a_models_state_may_count_decisions(tied):
    """Loads of experts, as floats and as integers, are those of the choices taken."""
    params, x = tied
    opt = optim.sgd(lr=0.1)

    def loss(params, x, states, turned=()):
        h = jnp.tanh(x @ params["w"])
        probs = jax.nn.softmax(h @ params["router"], -1)
        _, best = lax.top_k(probs, 3)
        second = jnp.where(among(x, turned), best[:, 2], best[:, 1])
        two = jnp.stack([best[:, 0], second], 1)
        chosen = jax.nn.one_hot(two, EXPERTS, dtype=h.dtype).sum(1)
        losses = (
            jnp.einsum("be,be->b", probs * chosen, h @ params["experts"]) - 1
        ) ** 2
        load = 0.9 * states["load"] + chosen.mean(0)
        count = states["count"] + chosen.astype(jnp.int32).sum(0, dtype=jnp.int32)
        return losses, {"count": count, "load": load}

    def step(turned, times=1.0, load=1.0):
        @jax.jit
        def run(p, s, states, x):
            def mean(p):
                losses, new = loss(p, x, states, turned)
                return losses.mean(), new

            gradient, new = jax.grad(mean, has_aux=True)(p)
            gradient = jax.tree.map(lambda g: g * times, gradient)
            return *opt.step(p, gradient, s), new | {"load": new["load"] * load}

        return run

    states = {
        "count": jnp.zeros(EXPERTS, jnp.int32),
        "load": jnp.ones(EXPERTS, x.dtype),
    }
    start = params, opt.init(params), states
    other = [x[TIED, -1]]
    given = {"other": step(other), "1.5 times": step(other, 1.5)}
    given |= {"load": step(other, load=1.1), "clear": step([x[TIED + 1, -1]])}
    report = verify.step(loss, opt.step, start, [x, 0.7 * x], given)
    assert report.of("other").ok, str(report)
    failing = {n: {r.path for r in report.of(n).failures} for n in given}
    assert failing["load"] == {"states/load"}
    assert failing["1.5 times"] == {f"params/{leaf}" for leaf in params}
    assert {"states/count", "params/experts"} <= failing["clear"]


def test_choices_that_cannot_be_told_are_not_judged(tied):
    """Of 9 ties in 12, which no run has seen; a fault beside them is found."""
    params, x = tied
    # Nothing but the names differs between the copies of the tied example.
    params = params | {"w": params["w"].at[-1].set(0)}
    params = planted(params, x, 1)
    names, copies = jnp.arange(17, dtype=x.dtype) / 17, jnp.stack([x[TIED]] * 12)
    x = jnp.concatenate([copies, x[:TIED], x[-1:]]).at[:, -1].set(names)
    opt = optim.sgd(lr=0.1)

    def step(turned, times=1.0):
        gradient = trainer(mixture, turned, times)
        return lambda p, s, x: opt.step(p, gradient(p, x)[1], s)

    given = {"nine": step(names[:9]), "sign": step(names[:9], -1.0)}
    start = params, opt.init(params)
    report = verify.step(mixture, opt.step, start, [x, x], given)
    assert not report.of("nine").failures, str(report)
    words = "12 of 17 examples have decisions that rounding may turn (top_k)"
    assert all(x.unjudged.startswith(words) for x in report.of("nine").unjudged)
    assert report.of("nine").unjudged
    assert any(f"step 1: {words}: 0, 1, 2, 3, 4, 5, ..." in x for x in report.notes)
    assert report.of("sign").failures


def sparse(p, g, s, turned=False, times=1.0):
    """The three largest entries of what is left over are sent, and the rest is kept."""
    total = s + g
    _, best = lax.top_k(jnp.abs(total), 4)
    taken = jnp.where(turned, best[jnp.array([0, 1, 3])], best[:3])
    sent = jnp.zeros_like(total).at[taken].set(total[taken])
    return p - 0.1 * times * sent, total - sent


def test_an_optimizers_own_decisions_are_taken_in_drift(rng):
    """A tie in the sixth of nine steps; later steps begin where its choice leads to."""
    p, s = jnp.asarray(rng.normal(size=7), jnp.float32), jnp.zeros(7, jnp.float32)
    gradients = list(jnp.asarray(rng.normal(size=(9, 7)), jnp.float32))
    state = p, s
    for gradient in gradients[:5]:
        state = sparse(state[0], gradient, state[1])
    left, g = (np.asarray(x) for x in (state[1], gradients[5]))
    third, fourth = np.argsort(-np.abs(left + g))[2:4]
    own = np.copysign(np.abs(left + g)[third], (left + g)[fourth]) - left[fourth]
    gradients[5] = gradients[5].at[fourth].set(own)

    def at(*steps, times=1.0):
        marks = jnp.stack([gradients[i][0] for i in steps])
        return lambda p, g, s: sparse(p, g, s, jnp.isin(g[0], marks), times), (p, s)

    given = {"same": (sparse, (p, s)), "other": at(5), "clear margin": at(6)}
    given |= {"both": at(5, 6), "1.1 times": at(5, times=1.1)}
    report = verify.drift(sparse, (p, s), gradients, given)
    for right in ("update", "same", "other"):
        assert report.of(right).ok, str(report)
    tied = f"after step 6 of 9: {OTHERWISE}: the reference takes its choices"
    assert set(report.notes) == {f"other: {tied}", f"both: {tied}"}
    first = {r.candidate: r.problem.partition(":")[0] for r in report.failures}
    assert first == {
        "clear margin": "after step 7 of 9", "both": "after step 7 of 9",
        "1.1 times": "after step 1 of 9",
    }  # fmt: skip
