"""The judge of functions: right answers pass, planted mistakes do not."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import VerificationError, verify
from jdist.verify import measure
from jdist.verify.bound import CHAOTIC, ROUNDINGS, Limit
from jdist.verify.candidates import _apart
from jdist.verify.gradient_check import GROSS
from jdist.verify.measure import LossPrograms, ReducedLoss
from jdist.verify.problem import standard
from jdist.verify.report import OracleCheck

pytestmark = pytest.mark.compiled

REDUCERS = {
    "mean": lambda losses, w: jnp.sum(losses * w) / jnp.sum(w),
    "sum": lambda losses, w: jnp.sum(losses * w),
    "max": lambda losses, w: jnp.max(losses, where=w > 0, initial=-jnp.inf),
    "min": lambda losses, w: jnp.min(losses, where=w > 0, initial=jnp.inf),
}


def micro_batches(problem, reduction="mean", size=3, drop=None, double=None):
    """Accumulates micro-batches one by one: an honest candidate, unless told not to."""

    @jax.jit
    def candidate(params, batch):
        w = jnp.asarray(problem.weights, batch["x"].dtype)
        total = jnp.sum(w) if reduction == "mean" else jnp.ones((), w.dtype)
        result = None
        for i, start in enumerate(range(0, len(w), size)):
            if i == drop:
                continue
            rows = jax.tree.map(lambda x, at=start: x[at : at + size], batch)
            part = jax.value_and_grad(
                lambda p, rows=rows, own=w[start : start + size]: (
                    jnp.sum(problem.loss_fn(p, rows) * own) / total
                )
            )(params)
            if i == double:
                part = jax.tree.map(lambda x: 2 * x, part)
            result = part if result is None else jax.tree.map(jnp.add, result, part)
        return result

    return candidate


@pytest.fixture(params=["float32", "float64"])
def problem(request):
    """The problem behind the matrix."""
    return standard(jnp.dtype(request.param))


def judge(problem, candidates, **options):
    """The judge on a problem."""
    return verify.gradients(
        problem.loss_fn, problem.params, problem.batch, candidates,
        weights=problem.weights, **options,
    )  # fmt: skip


MISTAKES = {
    "a dropped micro-batch": {"drop": 1},
    "a doubled micro-batch": {"double": 2},
    "a sum for a mean": {"reduction": "sum"},
}


def test_micro_batches_pass_and_planted_mistakes_fail(problem):
    """One call judges them all; each mistake is seen in every leaf that it touches."""
    candidates = {name: micro_batches(problem, **kw) for name, kw in MISTAKES.items()}
    report = judge(problem, {"honest": micro_batches(problem), **candidates})
    honest = report.of("honest")
    assert honest.ok, str(honest)
    assert honest.oracle is not None
    assert "pinned" in str(honest.oracle)
    # Neither so wide that it is blind nor so tight that it was luck.
    assert 1e-3 < honest.worst < 0.5
    for name in MISTAKES:
        failed = {leaf.path for leaf in report.of(name).failures}
        assert failed == {"(loss)", "bias", "readout", "shared"}, name
    problems = [leaf.problem for leaf in report.of("a sum for a mean").failures]
    total = f"{problem.weights.astype(float).sum():.4g}"[:4]
    assert all(f"it is {total}" in text for text in problems[1:])


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_every_reduction(reduction):
    """jnp's own reductions are judged right, a mean in their place is not."""
    problem = standard(jnp.float32)

    def by(name):
        w = jnp.asarray(problem.weights)
        return lambda p, b: jax.value_and_grad(
            lambda p: REDUCERS[name](problem.loss_fn(p, b), w)
        )(p)

    report = judge(
        problem, {"right": by(reduction), "mean": by("mean")}, reduction=reduction
    )
    assert report.of("right").ok
    assert not report.of("mean").ok


def test_the_bound_knows_rounding_inside_an_example(rng):
    """Two forms of one function, of which one cancels badly: both are right.

    (1 + a) - 1 loses the digits of a small a. No count of examples shows that; the
    measured rounding of each example's gradient does.
    """
    w = jnp.asarray(rng.normal(size=4), jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 4)) * 1e-4, jnp.float32)

    def cancelling(w, x):
        return ((1 + jnp.exp(x @ w)) - 2) ** 2

    def stable(w, x):
        return jax.value_and_grad(lambda w: jnp.mean(jnp.expm1(x @ w) ** 2))(w)

    report = verify.gradients(cancelling, w, x, {"stable": stable})
    assert report.ok, str(report)
    (leaf,) = [leaf for leaf in report.leaves if leaf.path == "(root)"]
    assert leaf.max_ulp > 1000


def test_scalar_losses_are_judged_too(rng):
    """The whole batch is then one term; a wrong factor is still seen."""
    w = jnp.asarray(rng.normal(size=3))
    x = jnp.asarray(rng.normal(size=(10, 3)))
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731

    def halves(w, x):
        parts = [jax.value_and_grad(loss)(w, part) for part in (x[:5], x[5:])]
        return jax.tree.map(lambda a, b: (a + b) / 2, *parts)

    def scaled(w, x):
        return jax.tree.map(lambda g: g * 1.001, halves(w, x))

    report = verify.gradients(loss, w, x, {"halves": halves, "scaled": scaled})
    assert report.of("halves").ok
    assert not report.of("scaled").ok


def test_integer_parameters_have_no_gradient():
    """None is right; zeros are an extra leaf."""
    params = {"w": jnp.array(2.0), "table": jnp.arange(3)}
    x = jnp.arange(4.0)
    loss = lambda p, x: (p["w"] * x + p["table"][1].astype(x.dtype)) ** 2  # noqa: E731

    def candidate(table):
        def fn(p, x):
            loss_of = lambda w: jnp.mean(loss({**p, "w": w}, x))  # noqa: E731
            value, gradient = jax.value_and_grad(loss_of)(p["w"])
            return value, {"w": gradient, "table": table}

        return fn

    report = verify.gradients(
        loss, params, x, {"none": candidate(None), "zeros": candidate(jnp.zeros(3))}
    )
    assert report.of("none").ok
    assert [leaf.path for leaf in report.of("zeros").failures] == ["table"]


def test_complex_parameters(rng):
    """JAX's convention for complex gradients is the oracle's; its conjugate fails."""
    z = jnp.asarray(rng.normal(size=3) + 1j * rng.normal(size=3))
    x = jnp.asarray(rng.normal(size=(5, 3)))
    loss = lambda z, x: jnp.abs(jnp.exp(x @ z)) ** 2 + (x @ z).imag  # noqa: E731

    def jaxs(z, x):
        return jax.value_and_grad(lambda z: loss(z, x).mean())(z)

    def conjugate(z, x):
        return jaxs(z, x)[0], jaxs(z, x)[1].conj()

    with jax.numpy_dtype_promotion("standard"):
        report = verify.gradients(loss, z, x, {"jax": jaxs, "conjugate": conjugate})
    assert report.of("jax").ok, str(report)
    assert not report.of("conjugate").ok


def test_a_derivative_of_its_own_is_told():
    """A custom rule that is not the derivative may be meant, and may be a mistake."""

    @jax.custom_vjp
    def squared(w, x):
        return (x @ w) ** 2

    squared.defvjp(
        lambda w, x: (squared(w, x), (w, x)),
        lambda saved, c: ((3 * c * (saved[1] @ saved[0])) @ saved[1], None),
    )
    w, x = jnp.array([0.1, 0.2]), jnp.array([[1.0, 2.0], [3.0, 5.0]])

    def same(w, x):
        return jax.value_and_grad(lambda w: squared(w, x).mean())(w)

    report = verify.gradients(squared, w, x, {"same": same})
    assert not report.ok
    assert not report.failures
    assert "a derivative of its own (custom_vjp of squared): slope" in str(report)
    with pytest.raises(
        VerificationError, match=r"not judged:\n  oracle not judged: the"
    ):
        report.raise_if_failed()
    unchecked = {"finite_differences": False}
    assert verify.gradients(squared, w, x, {"same": same}, **unchecked).ok
    # A reference that is wrong without such a rule fails the report.
    wrong = dataclasses.replace(report, oracle=OracleCheck(1.5, 1.0, 1e-6))
    assert not wrong.ok
    with pytest.raises(VerificationError, match=r"oracle WRONG: slope .* by finite"):
        wrong.raise_if_failed()


def test_a_kink_exactly_at_the_parameters_does_not_condemn_the_oracle():
    """ReLUs whose input is exactly 0, as with biases at their start."""
    params = {"b": jnp.zeros(3), "w": jnp.array([[1.0, -2.0, 0.5]])}
    x = jnp.zeros((6, 1))

    def loss(p, x):
        return jax.nn.relu(x @ p["w"] + p["b"][None]).sum(axis=1)

    def jaxs(p, x):
        return jax.value_and_grad(lambda p: loss(p, x).mean())(p)

    assert verify.gradients(loss, params, x, {"jax": jaxs}).ok


def test_examples_that_influence_each_other_are_noted(rng):
    """Batch statistics: no split can reproduce them, and the report says why."""
    x, w = jnp.asarray(rng.normal(size=(6, 2))), jnp.array([0.4, -0.7])

    def normalised(w, x):
        y = x @ w
        return (y - y.mean()) ** 2

    def jaxs(w, x):
        return jax.value_and_grad(lambda w: normalised(w, x).mean())(w)

    report = verify.gradients(normalised, w, x, {"jax": jaxs})
    assert any("examples influence each other" in note for note in report.notes)

    def apart(w, x):
        return jnp.abs(jnp.tanh(x @ w) - jnp.tanh(x @ w) * 3 + jnp.tanh(x @ w) * 2)

    def apart_too(w, x):
        return jax.value_and_grad(lambda w: (1 + apart(w, x)).mean())(w)

    quiet = verify.gradients(lambda w, x: 1 + apart(w, x), w, x, {"jax": apart_too})
    assert not any("influence" in note for note in quiet.notes)


@pytest.mark.parametrize(
    "shown",
    [
        lambda losses: losses,
        # Losses that say nothing of it, each equal to what it is alone.
        lambda losses: losses - jax.lax.stop_gradient(losses) + 1,
        lambda losses: losses + 1e9,
    ],
    ids=["plain", "detached", "constant"],
)
@pytest.mark.parametrize("given", [None, [1.0, 0.0, 2.0, 1.0, 3.0, 1.0, 1.0]])
def test_examples_that_influence_each_other_are_judged_together(given, shown, rng):
    """Alone, an example divides by almost 0, and zero would be near its gradient."""
    x, w = (
        jnp.asarray(rng.normal(size=(7, 3)), jnp.float32),
        jnp.array([0.3, 0.4, -0.2]),
    )
    own = jnp.asarray(given or [1.0] * 7, jnp.float32)

    def by_range(w, x):
        y = x @ w
        return shown(3 * jnp.tanh(y / (y.max() - y.min() + 1e-6)) ** 2)

    def times(factor):
        def candidate(w, x):
            fn = jax.value_and_grad(lambda w: (own @ by_range(w, x)) / own.sum())
            loss, gradient = fn(w)
            return loss, factor * gradient

        return candidate

    candidates = {f"{k}": times(k) for k in (1, 0, -1, 1 + 3e-5)}
    w = w.astype(jnp.float32)
    report = verify.gradients(
        by_range, w, x, candidates, weights=given, finite_differences=False
    )
    assert [report.of(name).ok for name in candidates] == [True, False, False, False]
    assert all(report.of(name).failures for name in ("0", "-1", "1.00003"))
    assert any("examples influence each other" in note for note in report.notes)


def test_a_gradient_near_zero_hides_no_influence(rng, monkeypatch):
    """Where terms cancel the bound is wide, and the examples' sum is the batch's."""
    exact, cotangents = LossPrograms.exact_gradient, []

    def counted(self, params, batch, *cotangent):
        cotangents.append(cotangent)
        return exact(self, params, batch, *cotangent)

    monkeypatch.setattr(LossPrograms, "exact_gradient", counted)
    x, y = jnp.asarray(rng.normal(size=(9, 3))), jnp.asarray(rng.normal(size=9))
    w = jnp.asarray(np.linalg.lstsq(np.asarray(x), np.asarray(y))[0], jnp.float32)
    batch = (x.astype(jnp.float32), y.astype(jnp.float32))
    traces = []

    def losses(w, batch):
        traces.append(batch[0].shape)
        return (batch[0] @ w - batch[1]) ** 2

    def right(w, batch):
        return jax.value_and_grad(lambda w: ((batch[0] @ w - batch[1]) ** 2).mean())(w)

    report = verify.gradients(
        losses, w, batch, {"jax": right}, finite_differences=False
    )
    assert report.ok
    assert not any("influence" in note for note in report.notes)
    at_an_optimum, traces[:] = len(traces), []
    assert verify.gradients(
        losses, w + 1, batch, {"jax": right}, finite_differences=False
    ).ok
    assert at_an_optimum > len(traces), "only a small gradient is computed once more"
    assert cotangents == [()], "without a user's rule nothing is left of a cotangent 0"


def test_ties_and_near_ties_of_a_maximum_are_noted():
    """Equal examples move together and are pinned; rounding decides a near tie."""
    x = jnp.array([[1.0], [2.0], [2.0]], jnp.float32)
    w = jnp.array([3.0], jnp.float32)

    def losses(w, x):
        return jnp.sin(x @ w) + x @ w

    def largest(w, x):
        return jax.value_and_grad(lambda w: losses(w, x).max())(w)

    tied = verify.gradients(losses, w, x, {"max": largest}, reduction="max")
    assert tied.ok
    assert "oracle pinned" in str(tied.oracle)
    near = x.at[2].set(jnp.nextafter(jnp.float32(2), jnp.float32(0)))
    report = verify.gradients(losses, w, near, {"max": largest}, reduction="max")
    assert any("rounding decides which example" in note for note in report.notes)


def test_a_judge_compiles_once(problem):
    """Called at every step, it traces the loss no more than at the first."""
    traces = 0

    def counted(params, batch):
        nonlocal traces
        traces += 1
        return problem.loss_fn(params, batch)

    judged = verify.gradients_judge(counted)
    candidates = {"micro-batches": micro_batches(problem)}
    arguments = (problem.params, problem.batch, candidates)
    judged(*arguments, weights=problem.weights)
    first = traces
    report = judged(*arguments, weights=problem.weights)
    assert report.ok
    # Two evaluations of the loss's shape, nothing compiled.
    assert traces - first <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": {}}, "must name at least one function"),
        (
            {"params": {"step": np.int32(3)}},
            "floating leaf: otherwise there is no gradient",
        ),
        ({"reduction": "median"}, "one of 'mean', 'sum', 'max', 'min'. Got 'median'"),
        ({"weights": np.ones(3)}, r"one per example, shape \(4,\). Got shape \(3,\)"),
        ({"weights": np.array([1.0, -1, 1, 1])}, r"finite, at least 0.*\[1.0, -1.0"),
        ({"weights": np.array([1.0, np.nan, 1, 1])}, r"at least 0.*\[1.0, nan"),
        ({"weights": np.zeros(4)}, r"not all 0. Got \[0.0, 0.0"),
        ({"batch": (np.ones((4, 1)), np.ones(3))}, "Got 0: 4, 1: 3"),
        ({"loss_fn": lambda w, x: x[0] * w}, r"one loss per example, shape \(4,\)"),
        (
            {"loss_fn": lambda w, x: (x[0] * w).sum(), "weights": np.ones(4)},
            "need one loss per example. Got a scalar loss. Return the losses before",
        ),
        (
            {"loss_fn": lambda w, x: (x[0] * w).sum(), "reduction": "max"},
            "need one loss per example. Got a scalar loss",
        ),
    ],
)
def test_refusals(options, message):
    """Before anything is judged."""
    arguments = {
        "loss_fn": lambda w, x: (x[0] * w)[:, 0],
        "params": jnp.array(2.0),
        "batch": (np.ones((4, 1)),),
        "candidates": {"any": lambda w, x: (w, w)},
        **options,
    }
    positional = [
        arguments.pop(k) for k in ("loss_fn", "params", "batch", "candidates")
    ]
    with pytest.raises(ValueError, match=message):
        verify.gradients(*positional, **arguments)


@pytest.mark.parametrize("name", ["gradients", "gradients_judge", "trace"])
def test_a_refusal_names_the_function_that_was_called(name):
    """Also where what it returned was called, and in notes on candidates that raise."""
    x, w = jnp.arange(3.0), jnp.array(1.0)

    def loss(w, x):
        return verify.tap((x["x"] if isinstance(x, dict) else x) * w, "product")

    def broken(w, x):
        raise KeyError("lost")

    def called(x=x, reduction="mean", weights=None):
        if name == "gradients_judge":
            judged = verify.gradients_judge(loss, reduction=reduction)
            return judged(
                w, x, {"candidate": broken}, weights=weights, finite_differences=False
            )
        candidate = broken if name == "trace" else {"candidate": broken}
        options = {"reduction": reduction, "weights": weights}
        return getattr(verify, name)(loss, w, x, candidate, **options)

    with pytest.raises(ValueError, match=rf"^`{name}\(reduction=...\)` must be one of"):
        called(reduction="median")
    called_name = f"{name}(...)" if name == "gradients_judge" else name
    made = re.escape(called_name)
    with pytest.raises(ValueError, match=rf"^`{made}\(weights=...\)` must be one per"):
        called(weights=np.ones(2))
    with pytest.raises(
        ValueError, match=rf"^`{made}\(batch=...\)` needs a batch whose"
    ):
        called(x={"x": x, "y": x[:2]})
    with pytest.raises(KeyError, match="lost") as caught:
        called()
    note = f"raised by the candidate 'candidate' of verify.{called_name}"
    assert caught.value.__notes__ == [note]


def test_candidates_that_misbehave_are_named():
    """Wrong result, and an exception of the candidate's own."""
    loss = lambda w, x: x * w  # noqa: E731
    x, w = jnp.arange(3.0), jnp.array(1.0)
    with pytest.raises(TypeError, match=r"candidates\['bare'\].*Got an array"):
        verify.gradients(loss, w, x, {"bare": lambda w, x: w})

    def broken(w, x):
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        verify.gradients(loss, w, x, {"broken": broken})
    assert "candidate 'broken'" in caught.value.__notes__[0]


def test_a_verdict_does_not_depend_on_its_neighbours():
    """Further looks are at those in doubt: the others keep their bound."""
    rng = np.random.default_rng(4)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((9, 3), (3,)))
    judged = verify.gradients_judge(lambda w, x: jnp.tanh(x @ w))
    right = jax.value_and_grad(lambda w, x: jnp.tanh(x[::-1] @ w).mean())

    def wrong(w, x):
        return right(w, 2 * x)

    alone = judged(w, x, {"right": right}, finite_differences=False)
    both = judged(w, x, {"wrong": wrong, "right": right}, finite_differences=False)
    assert {row.candidate for row in both.failures} == {"wrong"}
    assert not alone.bit_equal
    assert both.of("right").leaves == alone.leaves


@pytest.fixture
def looks(monkeypatch):
    """The number of draws of each example, in each measurement."""
    found = []
    measured = LossPrograms.gradients

    def noted(self, params, batch, shares, draws):
        found.append(draws)
        return measured(self, params, batch, shares, draws)

    monkeypatch.setattr(LossPrograms, "gradients", noted)
    return found


@pytest.fixture
def smooth(rng):
    """A loss of 11 examples, and its gradient as a candidate: scaled, an entry off."""
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((11, 5), (5,)))

    def loss(w, x):
        return jnp.tanh(x @ w) * jnp.exp(x[:, 0])

    def candidate(factor=1.0, off=0.0):
        def called(w, x):
            value, grad = jax.value_and_grad(lambda w: loss(w, x).mean())(w)
            return value, (grad * np.float32(factor)).at[2].add(np.float32(off))

        return called

    return loss, w, x, candidate


def test_what_is_right_or_grossly_wrong_is_measured_once(smooth, looks):
    """The draws of a second look are 16 times those of the first."""
    loss, w, x, candidate = smooth
    judged = verify.gradients_judge(loss)
    asked = {"right": 1, "twice": 2, "a fiftieth": 1.02, "nothing": 0, "NaN": np.nan}
    report = judged(
        w, x, {n: candidate(f) for n, f in asked.items()}, finite_differences=False
    )
    assert {row.candidate for row in report.failures} == set(asked) - {"right"}
    assert looks == [12]


def test_what_more_draws_might_explain_is_measured_again(smooth, looks):
    """A few bounds off, or far off but little of the leaf, as by another decision."""
    loss, w, x, candidate = smooth
    reduced, judged = ReducedLoss(loss, "mean", None), verify.gradients_judge(loss)
    counted, reference = reduced.reference(w, x, None)
    (limit,) = reduced.measure(w, counted, reference).limits.values()
    assert 2 < limit.doubt < 4
    least = GROSS * np.linalg.norm(reference[1])
    assert 100 * limit.bound[2] < least
    for off, expected, ok in [
        (0.9 * limit.bound[2], [12], True),
        (1.9 * limit.bound[2], [12, 192], False),
        (100 * limit.bound[2], [12, 192], False),
        (0.9 * least, [12, 192], False),
        (1.1 * least, [12], False),
    ]:
        looks.clear()
        report = judged(w, x, {"mine": candidate(off=off)}, finite_differences=False)
        assert (looks, report.ok) == (expected, ok)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1, [1]), (2, [3]), (1.1, [3]), (1.01, [5]), (1.002, [1, 5, 16, 64])],
)
def test_what_is_far_off_is_looked_at_at_once(
    factor, expected, smooth, looks, monkeypatch
):
    """With as many draws as show it to be wrong, where there is time for few."""
    monkeypatch.setattr(measure, "WORK", 1)
    loss, w, x, candidate = smooth
    judged = verify.gradients_judge(loss)
    report = judged(w, x, {"mine": candidate(factor)}, finite_differences=False)
    assert (looks, report.ok) == (expected, factor == 1)


def test_what_is_far_off_in_a_deep_model_is_looked_at_once(rng, looks, monkeypatch):
    """Where bounds are more than a thousand roundings wide, as in twelve layers."""
    monkeypatch.setattr(measure, "WORK", 1)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((11, 5), (5,)))
    loss = lambda w, x: ((x @ w + 2.0**10) - 2.0**10) ** 2  # noqa: E731

    def twice(w, x):
        value, grad = jax.value_and_grad(lambda w: loss(w, x).mean())(w)
        return value, 2 * grad

    reduced = ReducedLoss(loss, "mean", None)
    counted, reference = reduced.reference(w, x, None)
    (limit,) = reduced.measure(w, counted, reference).limits.values()
    width = np.linalg.norm(limit.bound) / np.linalg.norm(limit.size)
    assert 1.5 * ROUNDINGS < width / 2.0**-24 < CHAOTIC / 1.5
    looks.clear()
    report = verify.gradients(loss, w, x, {"twice": twice}, finite_differences=False)
    assert not report.ok
    assert looks == [3]


def test_a_leaf_of_few_digits_is_not_condemned_by_few_draws(looks):
    """Where rounding is amplified to whole digits, errors are not normal any more."""
    grow = lambda x: jax.lax.fori_loop(0, 20, lambda _, x: 3.9 * x * (1 - x), x)  # noqa: E731
    loss = lambda w, x: w * jax.vmap(grow)(x * w)  # noqa: E731
    w, x = jnp.float32(0.5), jnp.asarray([0.3, 0.6, 0.75, 0.9, 0.2], jnp.float32)

    def twice(w, x):
        value, grad = jax.value_and_grad(lambda w: loss(w, x).mean())(w)
        return value, 2 * grad

    report = verify.gradients(loss, w, x, {"twice": twice}, finite_differences=False)
    assert not report.ok
    assert looks == [26, 26 * 16]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([1, 2, 3], False),
        # Sums in another order: no excuse for a gradient that is wrong.
        ([1, 2.0005, 3], False),
        ([1, 2.002, 3], True),
        ([1, -np.inf, 3], True),
        ([1, 2], True),
        (None, False),
    ],
)
def test_answers_differ_where_an_entry_differs_by_more_than_rounding(other, told):
    """Only then a candidate may draw random numbers."""
    limits = {"n": None, "w": Limit(np.float64(1e-3), 1.0)}
    other = None if other is None else jnp.asarray(other, jnp.float32)
    first = {"n": np.int32(1), "w": jnp.float32([1, 2, 3])}
    assert _apart(first, {"n": np.int32(2), "w": other}, limits) == told
    assert not _apart({"w": other}, {"w": other}, limits)


def test_candidates_may_donate_what_they_are_given():
    """Each gets arrays of its own, also when it is called again."""
    problem = standard(jnp.dtype("float32"))

    def times(factor):
        def mean(p, b):
            return factor * (problem.loss_fn(p, b) * problem.weights).mean()

        return jax.jit(jax.value_and_grad(mean), donate_argnums=0)

    given = jax.tree.map(jnp.asarray, (problem.params, problem.batch))
    problem = dataclasses.replace(problem, params=given[0], batch=given[1])
    rest = np.float32(len(problem.weights) / problem.weights.sum())
    candidates = {"right": times(rest), "twice": times(2 * rest)}
    report = judge(problem, candidates, finite_differences=False)
    assert report.of("right").ok, str(report)
    assert report.of("twice").failures
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))


def test_candidates_may_overwrite_what_they_are_given():
    """A NumPy batch that one scales in place is neither the judge's nor another's."""
    rng = np.random.default_rng(7)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((7, 3), (3,)))
    kept = x.copy(), w.copy()

    def losses(w, x):
        return (x @ w) ** 2

    def right(w, x):
        return jax.value_and_grad(lambda w: losses(w, x).mean())(jnp.asarray(w))

    def overwriting(w, x):
        loss, gradient = right(w, jnp.array(x))
        # In bounds that are measured on this batch, one in a hundred is rounding.
        x *= 1000
        w[:] = 0
        return loss, 1.01 * gradient

    given = {"overwriting": overwriting, "right": right}
    report = verify.gradients(losses, w, x, given, finite_differences=False)
    assert [row.candidate for row in report.failures] == ["overwriting"]
    assert "it is 1.01 times the reference" in report.failures[0].problem
    assert report.of("right").ok
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(w, kept[1])


@pytest.mark.parametrize("shown", [np.asarray, jnp.from_dlpack])
def test_candidates_may_share_the_buffer_of_their_results(shown):
    """As two trainers of one torch module do, whose `p.grad` is one array."""
    rng = np.random.default_rng(8)
    x, w = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((7, 16), (16,)))
    # JAX copies buffers that do not begin at a multiple of 64 bytes.
    buffer = np.zeros(32, np.float32)
    start = -buffer.ctypes.data % 64 // buffer.itemsize
    buffer = buffer[start : start + 16]

    def losses(w, x):
        return (x @ w) ** 2

    def times(factor):
        def candidate(w, x):
            loss, gradient = jax.value_and_grad(lambda w: losses(w, x).mean())(w)
            buffer[:] = factor * gradient
            return loss, shown(buffer)

        return candidate

    given = {"twice": times(2), "right": times(1), "thrice": times(3)}
    report = verify.gradients(losses, w, x, given, finite_differences=False)
    told = {row.candidate: row.problem.rpartition("; ")[2] for row in report.failures}
    assert told == {
        "twice": "it is 2 times the reference",
        "thrice": "it is 3 times the reference",
    }


# --- candidates with other names ---

NAMES = {"in/w": ("inward/weight", (1, 0)), "in/b": "inward/bias", "out": "outward"}


@dataclasses.dataclass
class Tensor:
    """Numbers of another framework, as torch's: NumPy cannot read them as they are."""

    values: np.ndarray
    dtype: str = "another.float64"

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return np.asarray(self.values)

    def __array__(self, *_, **__):
        raise RuntimeError("call detach() first")


def elsewhere(factor=1.0, drawn=None):
    """The gradient of `renamed_loss` under the names of another framework."""

    def candidate(params, batch):
        floating = {name: params[name] for name in ("in", "out")}
        loss, own = jax.value_and_grad(lambda p: renamed_loss(p, batch).mean())(
            floating
        )
        noise = 0 if drawn is None else drawn.normal()
        inward = {
            "weight": Tensor(factor * own["in"]["w"].T),
            "bias": Tensor(own["in"]["b"] + noise),
        }
        return Tensor(loss), {"inward": inward, "outward": Tensor(own["out"])}

    return candidate


def renamed_loss(params, x):
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"][None])
    return (hidden @ params["out"]) ** 2


@pytest.fixture
def renamed(rng):
    """Parameters and a batch of it."""
    inward = {"w": rng.normal(size=(5, 7)), "b": rng.normal(size=7)}
    params = {"in": inward, "out": rng.normal(size=7), "count": np.arange(3)}
    return jax.tree.map(jnp.asarray, params), jnp.asarray(rng.normal(size=(11, 5)))


def test_a_candidate_may_have_names_and_tensors_of_its_own(renamed):
    """Each leaf is judged under the reference's path, with the reference's axes."""
    candidates = {"right": elsewhere(), "wrong": elsewhere(3.0)}
    reports = [
        verify.gradients(renamed_loss, *renamed, candidates, names=NAMES),
        verify.gradients_judge(renamed_loss)(*renamed, candidates, names=NAMES),
    ]
    for report in reports:
        paths = [leaf.path for leaf in report.of("right").leaves]
        assert paths == ["(loss)", "in/b", "in/w", "out"]
        assert report.of("right").ok, str(report)
        (leaf,) = report.failures
        assert (leaf.candidate, leaf.path) == ("wrong", "in/w")
        assert "it is 3 times the reference" in leaf.problem


def test_a_candidate_with_names_that_changes_is_not_judged(renamed, rng):
    """Its further calls are named as its first."""
    candidates = {"draws": elsewhere(drawn=rng)}
    report = verify.gradients(renamed_loss, *renamed, candidates, names=NAMES)
    assert {leaf.path for leaf in report.unjudged} == {"in/b"}
    assert "three calls" in report.unjudged[0].unjudged


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            {"in/w": "inward/weight"},
            "must name every leaf of the reference. Got no in/b",
        ),
        ({"in/w": "inward/weights"}, "Got inward/weights. Is inward/weight meant?"),
        (["in/w"], "must be a mapping from the reference's paths"),
        (
            NAMES | {"in/w": ("inward/weight", (1, 2))},
            "{'in/w': ...})` must order the 2 axes",
        ),
    ],
)
def test_names_that_are_no_map_are_refused(renamed, names, words):
    """In the words of `compare`, under the function that was called."""
    with pytest.raises((ValueError, TypeError), match=re.escape(words)) as told:
        verify.gradients(renamed_loss, *renamed, {"it": elsewhere()}, names=names)
    assert str(told.value).startswith("`gradients(names=")
