"""The search: what is tried, what is a finding, and what it says of an interaction."""

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import pytest

from experiments import _planted_layouts
from jdist import VerificationError, verify
from jdist.verify.fuzzing import layout_search
from tests.verify.fuzzing import ending_trainer

AXES = {"dp": (1, 2, 4), "tp": (1, 2), "cp": (1, 2), "micro": (1, 3), "mask": (0, 1)}


@pytest.fixture
def search(monkeypatch):
    """`search(outcome)`: a search whose layouts have the outcomes that a function says.

    It says "right", another outcome, or one with the words after it.
    """

    def run(outcome, axes=AXES, **options):
        judged = []

        class Judge:
            def __init__(self, *given):
                pass

            def judge(self, layout):
                assert layout not in judged
                judged.append(layout)
                name, _, words = outcome(layout).partition(": ")
                return verify.Verdict(layout, name, words)

            def trace(self, layout):
                return None, "no taps"

        with monkeypatch.context() as patch:
            patch.setattr(layout_search, "LayoutJudge", Judge)
            found = verify.fuzz(
                *[ending_trainer.problem] * 3, axes=axes, deadline=None, **options
            )
        return found, judged

    return run


def test_a_right_trainer_is_right(search):
    found, judged = search(lambda c: "right")
    assert found
    assert found.raise_if_failed() is found
    assert (found.smallest, found.trace, found.findings) == (None, None, ())
    assert [each.layout for each in found.verdicts] == judged
    assert judged == verify.covering_array(AXES)
    assert "ok: 6 layouts: 6 right; 0 combinations not covered" in str(found)


def test_the_table_counts_layouts_by_value(search):
    found, judged = search(lambda c: "wrong" if c["tp"] == 2 else "right")
    rows = {line.split()[0]: line.split()[1:] for line in str(found).splitlines()}
    twos = sum(layout["tp"] == 2 for layout in judged[: len(found.verdicts)])
    assert rows["tp=2"] == [str(sum(v.layout["tp"] == 2 for v in found.verdicts))]
    assert rows["tp=1"] == [str(sum(v.layout["tp"] == 1 for v in found.verdicts))]
    assert twos


@pytest.mark.parametrize("axes", list(combinations(AXES, 2)))
def test_each_interaction_of_two_axes_is_found_and_shrunk(search, axes):
    def outcome(layout):
        return "wrong" if all(layout[a] != AXES[a][0] for a in axes) else "right"

    found, judged = search(outcome)
    (finding,) = found.findings
    assert not found.ok
    assert finding.axes == {axis: AXES[axis][1] for axis in axes}
    assert finding.kept == ()
    assert found.smallest == {a: v[a in axes] for a, v in AXES.items()}
    assert outcome(finding.first) == "wrong"
    assert 0 < finding.judged <= 8
    assert len(judged) <= len(found.verdicts) + finding.judged
    with pytest.raises(VerificationError, match=r"wrong if .* and .*") as raised:
        found.raise_if_failed()
    assert str(raised.value).startswith("the trainer is not proved right\n")


def test_two_failures_are_two_findings(search):
    def outcome(layout):
        if layout["dp"] > 1 and layout["mask"]:
            return "raised: IndexError: 3 of 2"
        return "raised: KeyError: no axis 7" if layout["tp"] > 1 else "right"

    found, _ = search(outcome)
    told = [(each.axes, each.verdict.why) for each in found.findings]
    assert sorted(told, key=str) == [
        ({"dp": 2, "mask": 1}, "IndexError: 3 of 2"),
        ({"tp": 2}, "KeyError: no axis 7"),
    ]
    assert found.smallest["tp"] == 2
    assert found.smallest["mask"] == 0


def test_axes_of_the_layout_go_before_those_of_the_model(search):
    """Either of two axes explains the failure: that of the model is left."""

    def outcome(layout):
        return "wrong" if layout["dp"] > 1 or layout["mask"] else "right"

    for names in (("mask", "dp"), ("dp", "mask")):
        axes = {name: AXES[name][:2] for name in names}
        for left in names:
            found, _ = search(outcome, axes, model=[left], strength=1)
            assert set(found.findings[0].first.values()) == {1, 2}
            assert list(found.findings[0].axes) == [left]


def test_an_axis_that_cannot_go_back_is_not_called_needed(search):
    def outcome(layout):
        if layout["dp"] > 1 and layout["micro"] == 1:
            return "refused: ValueError: not without micro-batches"
        return "wrong" if layout["dp"] > 1 else "right"

    found, _ = search(outcome)
    (finding,) = found.findings
    assert finding.axes == {"dp": 2, "micro": 3}
    assert finding.kept == ("micro",)
    assert "wrong if dp=2 and micro=3 (not known to be needed: micro): " in str(finding)


def test_a_failure_everywhere_has_no_axes(search):
    found, _ = search(lambda c: "wrong: w: it is 0 times the reference")
    (finding,) = found.findings
    assert finding.axes == {}
    assert str(finding).startswith("wrong with every axis at its first value: w: it is")


def test_pairs_that_only_refused_layouts_have_are_uncovered(search):
    """What else was in a refused layout is tried in another one."""

    def outcome(layout):
        refused = layout["dp"] == 4 and layout["cp"] == 2
        return "refused: ValueError: too many" if refused else "right"

    found, judged = search(outcome)
    assert found.ok
    assert found.uncovered == ({"dp": 4, "cp": 2},)
    assert "not covered: dp=4, cp=2" in str(found)
    assert {v.outcome for v in found.verdicts} == {"right", "refused"}
    assert len(judged) < 20


def test_each_reason_of_refusals_is_told_once(search):
    def outcome(layout):
        if layout["tp"] == 2:
            return f"refused: NotImplementedError: not with tp of {layout['dp']}"
        odd = layout["cp"] == 2 and layout["micro"] == 3
        return "refused: ValueError: no micro-batches with cp" if odd else "right"

    found, _ = search(outcome)
    refused = [v for v in found.verdicts if v.outcome == "refused"]
    for words, axis in (("NotImplementedError: not w", "tp"), ("ValueError", "cp")):
        ((why, layouts),) = (
            r for r in found.refusals.items() if r[0].startswith(words)
        )
        own = [v for v in refused if v.why.startswith(words)]
        assert layouts == tuple(each.layout for each in own)
        assert len(layouts) > 1
        assert {layout[axis] for layout in layouts} == {2}
        line = f"refused in {len(layouts)}, such as dp={layouts[0]['dp']}, tp="
        assert sum(each.startswith(line) for each in str(found).splitlines()) == 1
        assert f"mask={layouts[0]['mask']}: {why}" in str(found)
    assert len(found.refusals) == 2
    assert search(lambda c: "right")[0].refusals == {}


def test_all_refused_is_not_ok(search):
    found, judged = search(lambda c: "refused: NotImplementedError: never")
    assert not found.ok
    assert {v.outcome for v in found.verdicts} == {"refused"}
    assert len(found.uncovered) > 30
    assert "not covered: 38 more" in str(found)
    assert len(judged) < 72


def test_what_is_not_judged_is_not_ok_and_not_shrunk(search):
    found, judged = search(lambda c: "not judged: w: zero" if c["tp"] > 1 else "right")
    assert not found.ok
    assert found.findings == ()
    assert len(judged) == len(found.verdicts)


def test_random_layouts_follow_while_there_is_time(search, monkeypatch):
    """All layouts in the end, none twice, in another order in each search."""
    _, judged = search(lambda c: "right", seconds=60)
    assert len(judged) == 48
    assert judged[:6] == verify.covering_array(AXES)
    assert search(lambda c: "right", seconds=60)[1] != judged
    now = iter(range(1000))
    monkeypatch.setattr(layout_search.time, "monotonic", lambda: next(now))
    _, judged = search(lambda c: "right", seconds=5)
    # Some of the four may be in the covering array.
    assert 6 <= len(judged) <= 10


def test_three_axes_need_strength_three(search):
    def outcome(layout):
        three = layout["dp"] == 4 and layout["cp"] == 2 and layout["micro"] == 3
        return "wrong" if three else "right"

    found, _ = search(outcome, strength=3)
    assert found.findings[0].axes == {"dp": 4, "cp": 2, "micro": 3}


def test_an_interrupt_prints_what_is_known(search, capsys):
    def outcome(layout):
        if layout["cp"] == 2:
            raise KeyboardInterrupt("by the user")
        return "right"

    with pytest.raises(KeyboardInterrupt, match="by the user"):
        search(outcome)
    told = capsys.readouterr()
    assert "  1 right      dp=1, tp=1, cp=1, micro=1, mask=0" in told.err
    assert "combinations not covered" in told.err
    assert not told.out


# With the judge itself.

TINY = ending_trainer.problem, ending_trainer.claim


def tiny(trainer=ending_trainer.trainer, axes=ending_trainer.AXES, **options):
    return verify.fuzz(*TINY, trainer, axes=axes, deadline=None, **options)


def test_exceptions_and_refusals_of_the_trainer():
    axes = {"way": ("right", "raise", "refuse"), "tp": (1, 2)}
    found = tiny(axes=axes)
    outcomes = {each.layout["way"]: each.outcome for each in found.verdicts}
    assert outcomes == {"right": "right", "raise": "raised", "refuse": "refused"}
    (finding,) = found.findings
    assert finding.verdict.why == "RuntimeError: no axis 1 here"
    assert "in candidate" in finding.verdict.details
    refused = [v for v in found.verdicts if v.outcome == "refused"]
    assert {v.why for v in refused} == {"NotImplementedError: not with tp"}
    assert [set(each.values()) for each in found.uncovered] == [
        {"refuse", 1}, {"refuse", 2},
    ]  # fmt: skip


def test_a_trainer_may_refuse_before_it_is_called():
    def trainer(layout):
        if layout["tp"] == 2:
            raise ValueError("no tensor parallelism\nyet")
        return ending_trainer.gradient

    found = tiny(trainer, {"tp": (1, 2)}, strength=1)
    assert found.ok
    assert found.verdicts[1].why == "ValueError: no tensor parallelism"


def test_an_error_of_jax_about_shapes_is_seen_among_the_refusals():
    """A trainer that splits its examples wrongly has not refused the layout."""

    def trainer(layout):
        def candidate(w, x):
            parts = jnp.split(x, layout["tp"])
            found = [ending_trainer.gradient(w, part) for part in parts]
            return jax.tree.map(lambda *each: sum(each) / len(parts), *found)

        return candidate

    found = tiny(trainer, {"tp": (1, 2, 5)}, strength=1)
    ((why, layouts),) = found.refusals.items()
    assert layouts == ({"tp": 2}, {"tp": 5})
    assert why.startswith("ValueError: array split does not result in an equal")
    assert f"refused in 2, such as tp=2: {why}" in str(found)
    assert "in candidate" in found.verdicts[1].details


def test_what_is_no_candidate_is_a_finding():
    found = tiny(lambda layout: lambda w, x: w, {"tp": (1,)}, strength=1)
    assert found.findings[0].verdict.outcome == "raised"
    assert "TypeError" in found.findings[0].verdict.why


def test_the_first_wrong_value_is_named():
    """By the taps, in the smallest layout; with weights."""

    def claim(layout):
        def losses(w, x, factor=1.0):
            hidden = verify.tap(jnp.tanh(x @ w), "hidden")
            return verify.tap(factor * hidden, "scaled") ** 2

        return losses

    def trainer(layout):
        factor = 1.5 if layout["tp"] == 2 else 1.0
        weights = jnp.asarray([1, 2, 3], jnp.float32)

        def loss(w, x):
            return (claim({})(w, x, jnp.float32(factor)) * weights).sum() / 6

        return jax.value_and_grad(loss)

    def problem(layout):
        return *ending_trainer.problem({}), jnp.asarray([1, 2, 3], jnp.float32)

    axes = {"tp": (1, 2), "cp": (1, 2)}
    found = verify.fuzz(problem, claim, trainer, axes=axes, deadline=None)
    assert found.smallest == {"tp": 2, "cp": 1}
    assert found.trace.difference.direction == "forward"
    assert found.trace.difference.tap == "scaled"
    assert "wrong if tp=2: forward, scaled, examples 0-2: " in str(found)


def test_without_taps_the_report_has_the_reason():
    def trainer(layout):
        return lambda w, x: jax.tree.map(lambda g: 2 * g, ending_trainer.gradient(w, x))

    found = tiny(trainer, {"tp": (1,)}, strength=1)
    (finding,) = found.findings
    assert found.trace is None
    assert "must mark values with verify.tap" in finding.untraced
    assert "wrong with every axis at its first value: (root): off by" in str(found)


def test_a_step_keeps_the_state_of_its_optimizer():
    """Momentum shows in the second step what the first does not."""

    def claim(layout):
        def update(w, gradient, velocity):
            velocity = 0.5 * velocity + gradient
            return w - velocity, velocity

        return ending_trainer.claim({}), update, jnp.zeros_like

    def trainer(layout):
        def step(w, velocity, x):
            _, gradient = ending_trainer.gradient(w, x)
            own = (0.25 if layout["tp"] == 2 else 0.5) * velocity + gradient
            return w - own, own

        return step

    given = ending_trainer.problem, claim, trainer
    found = verify.fuzz(*given, axes={"tp": (1, 2)}, strength=1, deadline=None)
    assert found.findings[0].axes == {"tp": 2}
    assert found.findings[0].verdict.why.startswith("step 2, wrong ")


def test_a_problem_sees_the_axes_of_the_model_alone():
    def claim(layout):
        return ending_trainer.claim({}) if layout["tp"] else None

    words = (
        "fuzz\\(problem=..., claim=...\\)` must give what can be judged, for all "
        "values of the axes in `model`. Got KeyError: 'tp', for the only claim; the "
        "axis 'tp' is not in `model`"
    )
    given = ending_trainer.problem, claim, ending_trainer.trainer
    with pytest.raises(ValueError, match=words):
        verify.fuzz(*given, axes={"tp": (1, 2)}, strength=1, deadline=None)


@pytest.mark.parametrize(
    ("problem", "claim", "words"),
    [
        (lambda c: 3, TINY[1], "must return \\(params, batch\\) or .* Got .*int"),
        (TINY[0], lambda c: (1, 2, 3, 4), "must return loss_fn, .* Got 4 results"),
        (TINY[0], lambda c: 3, "fuzz\\(loss_fn=...\\)` must be a function"),
        (
            lambda c: (*TINY[0](c), jnp.ones(4)),
            TINY[1],
            "weights=...\\)` must be one per example.* for mask=0",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(problem, claim, words):
    axes = {"mask": (0, 1), "tp": (1, 2)}
    options = {"axes": axes, "model": ["mask"], "deadline": None}
    with pytest.raises(ValueError, match=words):
        verify.fuzz(problem, claim, ending_trainer.trainer, **options)


def test_another_process_tells_what_cannot_be_judged():
    options = {"axes": {"tp": (1, 2)}, "strength": 1}
    given = _planted_layouts.problem, ending_trainer.claim, ending_trainer.trainer
    with pytest.raises(ValueError, match="KeyError: 'tie', for the only c") as raised:
        verify.fuzz(*given, **options)
    assert "in problem" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"problem": 3}, TypeError, "fuzz\\(problem=...\\)` must be a function. Got 3"),
        ({"claim": 3}, TypeError, "fuzz\\(claim=...\\)` must be a function. Got 3"),
        ({"trainer": 3}, TypeError, "fuzz\\(trainer=...\\)` must be a function. Got 3"),
        ({"axes": {}}, ValueError, "fuzz\\(axes=...\\)` must have at least one axis"),
        (
            {"axes": {"tp": ()}},
            ValueError,
            "'tp': ...}\\)` must be .* at least one. Got ",
        ),
        ({"model": "mask"}, TypeError, "fuzz\\(model=...\\)` must be names of axes"),
        ({"model": ["dp", "pp"]}, ValueError, "must be one of 'dp', 'tp'. Got 'pp'"),
        ({"strength": 3}, ValueError, "fuzz\\(strength=...\\)` must be from 1 to 2"),
        ({"strength": 0}, ValueError, "fuzz\\(strength=...\\)` must be from 1 to 2"),
        ({"valid": lambda c: False}, ValueError, "must allow at least one layout"),
        (
            {"seconds": 0},
            ValueError,
            "fuzz\\(seconds=...\\)` must be a positive number",
        ),
        (
            {"deadline": -1},
            ValueError,
            "fuzz\\(deadline=...\\)` must be a positive num",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, error, words):
    axes = {"dp": (1, 2), "tp": (1, 2)}
    given = dict(zip(("problem", "claim"), TINY, strict=True))
    given |= {"trainer": ending_trainer.trainer, "axes": axes, "deadline": None}
    with pytest.raises(error, match=words):
        verify.fuzz(**{**given, **options})


@pytest.mark.parametrize("steps", [False, True])
def test_a_claim_may_be_a_scalar(steps):
    """Such as a sum: a loss for each example is a mean's."""

    def problem(layout):
        return jnp.array([0.3, 0.4]), jnp.arange(10.0).reshape(5, 2) / 9

    def loss(w, x):
        return jnp.tanh(x @ w) ** 2

    def update(w, gradient, state):
        return w - 0.1 * gradient, state

    def trainer(layout):
        whole = jnp.sum if layout["sum"] else jnp.mean
        gradient = jax.value_and_grad(lambda w, x: whole(loss(w, x)))
        if not steps:
            return gradient
        return lambda w, s, x: update(w, gradient(w, x)[1], s)

    def found(reduction):
        whole = lambda w, x: reduction(loss(w, x))  # noqa: E731
        claim = (whole, update) if steps else whole
        options = {"axes": {"sum": (False, True)}, "strength": 1, "deadline": None}
        report = verify.fuzz(problem, lambda layout: claim, trainer, **options)
        return [each.outcome for each in report.verdicts]

    assert found(lambda losses: losses) == found(jnp.mean) == ["right", "wrong"]
    assert found(jnp.sum) == ["wrong", "right"]


def test_a_loss_with_a_rule_of_its_own_is_not_judged():
    @jax.custom_jvp
    def halved(x):
        return x

    halved.defjvp(lambda primals, tangents: (primals[0], tangents[0] / 2))

    def loss(w, x):
        return halved(jnp.tanh(x @ w)) ** 2

    report = verify.fuzz(
        lambda layout: (jnp.array([0.3, 0.4]), jnp.arange(10.0).reshape(5, 2) / 9),
        lambda layout: loss,
        lambda layout: jax.value_and_grad(lambda w, x: loss(w, x).mean()),
        axes={"dp": (1, 2)},
        strength=1,
        deadline=None,
    )
    assert [each.outcome for each in report.verdicts] == ["not judged"] * 2


def test_an_interaction_with_a_step_is_shrunk_to_its_axes():
    """Some layouts are judged by their gradients, and others by their steps.

    `python -m experiments fuzz_study` has the other interactions.
    """
    own = _planted_layouts
    free = ("tp", "clip")
    axes = {a: each if a in free else each[:1] for a, each in own.AXES.items()}
    given = own.problem, own.claim, partial(own.trainer, fault="copies in the norm")
    options = {"axes": axes, "model": own.MODEL, "deadline": None}
    (finding,) = verify.fuzz(*given, **options).findings
    assert set(finding.axes) == {"tp", "clip"}
    assert finding.kept == ()
    assert finding.verdict.outcome == "wrong"
