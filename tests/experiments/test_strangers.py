"""Strangers on trial: planted trainers get the verdict they deserve, real ones that of
arithmetic, and those that are not installed are named."""

import importlib
from dataclasses import replace
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments import strangers
from experiments.strangers import flax_optimizer, problem, showing, stranger, trial
from experiments.strangers.problem import MEAN_OF_MEANS, NOTHING, OVER_ALL, Reference
from experiments.strangers.stranger import Refused, Use, judged
from jdist import verify
from jdist.verify.report import OracleCheck
from tests.newcomer import own_promotions

SETTINGS = ("equal", "padded", "short end")


@pytest.fixture(scope="module", autouse=True)
def newcomer():
    """The strangers rely on JAX's own promotions."""
    with own_promotions(), jax.enable_x64(False):
        yield


@pytest.fixture(scope="module")
def steps():
    """Of every setting, by name."""
    return {step.setting: step for step in problem.steps(3)}


def gradient_of_tokens(step, rows, divisor):
    """The sum of the weighted losses of some sequences, over a number; by another way
    than the reference's: sequence by sequence."""
    total = None
    for row in rows:
        inputs, targets, weights = (leaf[row : row + 1] for leaf in step.whole)

        def loss(params, inputs=inputs, targets=targets, weights=weights):
            scores = problem.logits(params, inputs)[0]
            chosen = scores[jnp.arange(len(scores)), targets[0]]
            surprise = jax.scipy.special.logsumexp(scores, -1) - chosen
            return jnp.sum(surprise * weights[0])

        own = jax.grad(loss)(step.params)
        total = own if total is None else jax.tree.map(jnp.add, total, own)
    return jax.tree.map(lambda leaf: np.asarray(leaf / divisor), total)


def use(show, shows="gradient", **options):
    return Use("planted", "a use", "a claim", show, shows, "said", "link", **options)


# --- the problem ---


def test_the_settings_differ_in_what_they_are_named_for(steps):
    """Equal parts are equal; everywhere else parts differ, or one is missing."""
    counts = {
        name: [float(part.weights.sum()) for part in step.parts]
        for name, step in steps.items()
    }
    assert counts["equal"] == [36.0] * 3
    assert counts["short end"] == [36.0] * 2
    assert counts["small last"] == [36.0, 36.0, 18.0]
    for name in ("padded", "masked", "weighted"):
        assert len(set(counts[name])) == 3
    padded = steps["padded"].whole.weights
    assert (np.diff(padded, axis=1) <= 0).all()
    assert (np.diff(steps["masked"].whole.weights, axis=1) > 0).any()
    labels = steps["masked"].whole.labels
    assert ((labels == -100) == (steps["masked"].whole.weights == 0)).all()


@pytest.mark.parametrize("setting", ["padded", "weighted"])
def test_the_reference_is_the_mean_over_what_counts(steps, setting):
    """Beside the sum over sequences, one at a time."""
    step = steps[setting]
    every = range(len(step.whole.inputs))
    total = step.whole.weights.sum()
    wanted = gradient_of_tokens(step, every, total)
    reference = Reference(step)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(reference.gradient[name], leaf, atol=1e-6)
    positions = Reference(step, "positions").gradient
    share = total / step.whole.weights.size
    for name, leaf in wanted.items():
        np.testing.assert_allclose(positions[name], share * leaf, atol=1e-6)


def test_the_usual_mistakes_are_told_from_each_other(steps):
    """By a part of the gradient each, in a setting that has it."""
    step = steps["small last"]
    reference = Reference(step)
    rules = {name: reference.of(rule) for name, rule in reference.rules().items()}
    halves = [gradient_of_tokens(step, rows, 1) for rows in ((0, 1, 2, 3), (8, 9))]
    whole = gradient_of_tokens(step, range(4, 8), 36)
    means = jax.tree.map(
        lambda a, b, c: a / 36 + b + c / 18, halves[0], whole, halves[1]
    )
    for name, leaf in means.items():
        np.testing.assert_allclose(rules[MEAN_OF_MEANS][name], leaf / 3, atol=1e-6)
        np.testing.assert_allclose(
            rules["sum of the parts' means"][name], leaf, atol=1e-6
        )
    short = Reference(steps["short end"])
    mistaken = short.of(short.rules()[OVER_ALL])
    for name, leaf in short.gradient.items():
        np.testing.assert_allclose(mistaken[name], leaf * 2 / 3, atol=1e-6)


# --- what is offered beside accumulation ---


def whole_gradient(step, own=lambda surprise, partition: surprise, dtype=jnp.float32):
    """The mean over all tokens, of a loss of each, by another way than `problem`'s."""

    def loss(params):
        p = {name: jnp.asarray(leaf, dtype) for name, leaf in params.items()}
        one_hot = jax.nn.one_hot(step.whole.inputs, problem.VOCABULARY, dtype=dtype)
        hidden = jnp.tanh(one_hot @ p["embedding"] @ p["up"] + p["bias"]) @ p["down"]
        scores = jnp.einsum("bth,vh->btv", hidden, p["embedding"]).astype(jnp.float32)
        partition = jax.scipy.special.logsumexp(scores, -1)
        hit = jax.nn.one_hot(step.whole.targets, problem.VOCABULARY)
        return own(partition - (hit * scores).sum(-1), partition).mean()

    return jax.tree.map(np.asarray, jax.grad(loss)(dict(step.params)))


def norm(gradient):
    return np.sqrt(
        sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in gradient.values())
    )


def limited(gradient, limit=problem.CLIP):
    factor = min(1.0, limit / norm(gradient))
    return {name: np.float32(factor) * leaf for name, leaf in gradient.items()}


def of_parts(step, made=lambda part: part):
    """What is made of each part's gradient, averaged."""
    parts = [
        whole_gradient(replace(step, whole=part, sizes=(len(part.inputs),)))
        for part in step.parts
    ]
    return jax.tree.map(lambda *x: np.mean(x, 0), *map(made, parts))


def test_a_clipped_step_is_judged_by_the_norm_of_the_whole(steps):
    """Clipping each part, each parameter or nothing is another gradient, by name."""
    step = steps["clipped by norm"]
    whole = whole_gradient(step)
    assert norm(whole) > 2 * problem.CLIP
    offers = ("clipped by norm",)
    for show, verdict, rule in (
        (limited(whole), "right", ""),
        (whole, "wrong", "not clipped"),
        (of_parts(step, limited), "wrong", "each part clipped"),
        (
            {k: limited({k: x})[k] for k, x in whole.items()},
            "wrong",
            "each parameter clipped",
        ),
        (limited(whole, 1.01 * problem.CLIP), "wrong", ""),
    ):
        found = judged(use(lambda _, show=show: show, offers=offers), step)
        assert (found.verdict, found.rule) == (verdict, rule)


def test_how_often_an_auxiliary_loss_counts_is_told(steps):
    """Once; in full for each of three parts; or never, with another mistake beside."""
    step = steps["auxiliary loss"]
    offers = ("auxiliary loss",)

    def of(times):
        factor = times * problem.AUXILIARY
        return whole_gradient(step, lambda own, partition: own + factor * partition**2)

    in_full, none = "auxiliary loss of each part in full", "no auxiliary loss"
    for show, verdict, rule in (
        (of(1), "right", ""),
        (of(3), "wrong", in_full),
        (of(0), "wrong", none),
        (
            jax.tree.map(lambda x: 3 * x, of(0)),
            "wrong",
            f"sum of the parts' means; {none}",
        ),
        (of(2), "wrong", ""),
    ):
        found = judged(use(lambda _, show=show: show, offers=offers), step)
        assert (found.verdict, found.rule) == (verdict, rule)


@pytest.mark.parametrize("shows", ["gradient", "parameters"])
def test_a_model_in_bfloat16_is_judged_by_its_own_rounding(steps, shows):
    """The gradient in bfloat16 is right, that of three times the loss is not."""
    step = steps["mixed precision"]
    wrap = stepped if shows == "parameters" else (lambda show: show)
    right = whole_gradient(step, dtype=jnp.bfloat16)
    assert max(
        np.abs(right[k] / x - 1).max() for k, x in Reference(step).gradient.items()
    ) > 1e-3  # fmt: skip
    offers = ("mixed precision",)
    for factor, verdict, rule in (
        (1, "right", ""),
        (1.2, "wrong", ""),
        (3, "wrong", "sum of the parts' means"),
    ):
        show = {k: np.float32(factor) * x for k, x in right.items()}
        tried = use(wrap(lambda _, show=show: show), shows, offers=offers)
        found = judged(tried, step)
        assert (found.verdict, found.rule) == (verdict, rule)


def test_what_a_use_has_no_option_for_is_not_offered(steps):
    """Nor tried, and no row of the table of options is without one."""
    chosen = [steps["equal"], steps["clipped by norm"], steps["mixed precision"]]
    none = verdicts_on(scaled(1.0), chosen)
    assert [f.verdict for f in none.findings] == ["right", *["not offered"] * 2]
    assert none.findings[1].why == "left to the user's own code"
    one = verdicts_on(scaled(1.0), chosen, offers=("mixed precision",))
    apart = showing.apart([none, one])
    assert [len(own) for own in apart.values()] == [2, 1]
    header, row = showing.rows(apart["Verdicts with options"])
    assert header[2:4] == ["clipped by norm", "mixed precision"]
    assert row[2:4] == ["not offered", "right"]
    assert list(showing.apart([none])) == ["Verdicts"]


# --- planted trainers ---


def rule(name):
    def show(step):
        reference = Reference(step)
        return reference.of(reference.rules()[name])

    return show


def scaled(factor):
    def show(step):
        gradient = Reference(step).gradient
        return {name: np.float32(factor) * leaf for name, leaf in gradient.items()}

    return show


def stepped(gradient_of):
    def show(step):
        found = gradient_of(step)
        return {name: leaf - found[name] for name, leaf in step.params.items()}

    return show


def test_what_a_trainer_claims_is_what_it_is_held_against(steps):
    """The same gradient is right by one claim and wrong by another."""
    right = scaled(1.0)
    assert judged(use(right), steps["padded"]).verdict == "right"
    found = judged(use(right, divisor="positions"), steps["padded"])
    assert found.verdict == "wrong"
    weights = steps["padded"].whole.weights
    assert found.factor == pytest.approx(weights.size / weights.sum(), rel=1e-6)


@pytest.mark.parametrize("shows", ["gradient", "parameters"])
def test_a_wrong_gradient_is_measured_and_named(steps, shows):
    """Seen in the gradient itself, or in the parameters after the step."""
    wrap = stepped if shows == "parameters" else (lambda show: show)
    right = judged(use(wrap(scaled(1.0)), shows), steps["masked"])
    assert (right.verdict, str(right)) == ("right", "right")
    three = judged(use(wrap(scaled(3.0)), shows), steps["masked"])
    assert three.factor == pytest.approx(3, rel=1e-5)
    assert three.distance == pytest.approx(2, rel=1e-5)
    assert (str(three), three.rule) == ("3 x", "")
    assert str(judged(use(wrap(scaled(1.01)), shows), steps["masked"])) == "1.01 x"
    means = judged(use(wrap(rule(MEAN_OF_MEANS)), shows), steps["masked"])
    assert means.verdict == "wrong"
    assert means.factor is None
    assert means.rule == MEAN_OF_MEANS
    reference = Reference(steps["masked"])
    other = reference.of(reference.rules()[MEAN_OF_MEANS])
    apart = sum(np.sum((other[k] - reference.gradient[k]) ** 2) for k in other)
    length = sum(np.sum(leaf**2) for leaf in reference.gradient.values())
    assert means.distance == pytest.approx(float(np.sqrt(apart / length)), rel=1e-4)
    nothing = judged(use(wrap(rule(NOTHING)), shows), steps["masked"])
    assert (nothing.verdict, nothing.rule) == ("no step", NOTHING)


def test_a_small_fault_is_seen(steps):
    """One leaf off by a thousandth, in a gradient and in parameters."""

    def off(step):
        found = Reference(step).gradient
        return {**found, "up": found["up"] * np.float32(1.001)}

    for each in (use(off), use(stepped(off), "parameters")):
        found = judged(each, steps["equal"])
        assert (found.verdict, found.rule) == ("wrong", "")


def test_names_and_axes_are_the_strangers(steps):
    """Forgotten, the transposed weight is no gradient of this model."""

    def theirs(step):
        found = Reference(step).gradient
        swapped = {"up": "a.weight", "down": "b.weight", "bias": "a.bias"}
        rest = {theirs: found[own].T for own, theirs in swapped.items()}
        return {"e": found["embedding"], **rest}

    names = {
        "embedding": "e",
        "up": ("a.weight", (1, 0)),
        "bias": "a.bias",
        "down": ("b.weight", (1, 0)),
    }
    assert judged(use(theirs, names=names), steps["weighted"]).verdict == "right"
    del names["bias"]
    with pytest.raises(ValueError, match=r"every leaf of the reference\. Got no bias"):
        judged(use(theirs, names=names), steps["weighted"])


def test_what_is_not_offered_or_refused_is_said(steps):
    """Neither is a verdict on a gradient."""

    def refuses(step):
        raise Refused("10 is no multiple of 4")

    found = judged(use(refuses), steps["small last"])
    assert (found.verdict, found.why) == ("refused", "10 is no multiple of 4")
    assert trial.Verdict(use(refuses), [found], 1).word == (
        "not judged; refuses small last"
    )
    right = judged(use(scaled(1.0)), steps["equal"])
    word = trial.Verdict(use(refuses), [right, found], 1).word
    assert word == "right; refuses small last"
    lacks = {"weighted": "labels have no weights"}
    found = judged(use(refuses, lacks=lacks), steps["weighted"])
    assert (found.verdict, found.why) == ("not offered", "labels have no weights")


def test_a_step_that_rounding_hides_is_not_judged(steps):
    """Beside large parameters a small one cannot be seen, right or wrong."""
    step = steps["equal"]
    # Where tanh is nearly flat, the gradient is below the last place of the bias.
    flat = {**step.params, "bias": np.full_like(step.params["bias"], 8.0)}
    step = replace(step, params=flat)
    assert Reference(step).gradient["bias"].any()
    assert judged(use(scaled(1.0)), step).verdict == "right"
    found = judged(use(stepped(scaled(1.0)), "parameters"), step)
    assert found.verdict == "not judged"
    assert "bias" in found.why


# --- the verdict on all settings ---


def verdicts_on(show, steps, **options):
    chosen = use(show, **options)
    return trial.Verdict(chosen, [judged(chosen, step) for step in steps], 7)


# The real one is made by the quick form, which another test runs.
CHECK = OracleCheck(slope=2.0, difference=2.1, tolerance=0.2)
ROW = verify.LeafReport("itself", "w", "float32", (), ratio=0.0)
ORACLE = verify.Report((ROW,), CHECK)


def test_planted_trainers_make_the_claims_fail(steps):
    """Each claim, by the trainer that contradicts it; all hold without it."""
    chosen = [steps[name] for name in SETTINGS]
    fair = verdicts_on(rule(MEAN_OF_MEANS), chosen)
    mended = verdicts_on(scaled(1.0), chosen, remedy=True)
    made = lambda *verdicts: [  # noqa: E731
        claim.verdict for claim in strangers.claims(verdicts, chosen, {}, ORACLE)
    ]
    assert made(fair, mended) == ["holds"] * 5
    assert fair.word == "right only if equal or short end"
    assert mended.word == "right"
    unnamed = verdicts_on(scaled(1.5), chosen)
    assert unnamed.word == "wrong"
    assert made(fair, mended, unnamed)[0] == "does not hold"
    other = replace(unnamed, use=replace(unnamed.use, stranger="another"))
    assert made(fair, mended, other)[1] == "does not hold"
    useless = replace(fair, use=replace(fair.use, remedy=True))
    assert made(fair, useless)[2] == "does not hold"
    wrong = replace(ORACLE, oracle=replace(ORACLE.oracle, slope=1.0))
    found = strangers.claims([fair, mended], chosen, {}, wrong)
    assert found[4].verdict == "does not hold"
    blunt = strangers.claims([fair, mended], [steps["equal"]], {}, ORACLE)
    assert blunt[3].verdict == "does not hold"


def test_who_is_not_there_is_named(monkeypatch):
    """Never silently fewer: a claim that is not judged, with the remedy."""
    monkeypatch.setattr(trial, "find_spec", lambda name: None if name == "keras" else 1)
    left = strangers.left_out(quick=False)
    assert left == dict.fromkeys(
        ("keras_fit", "keras_distribution"),
        f"keras not installed: {trial.INSTALL}",
    )
    quick = strangers.left_out(quick=True)
    assert quick["torch_ddp"] == "the quick form leaves out what needs torch"
    assert quick.keys() - left.keys() == {
        name for name, needed in trial.TRAINERS.items() if "torch" in needed
    }


def test_absent_strangers_are_claims_that_are_not_judged(steps):
    chosen = [steps[name] for name in SETTINGS]
    found = verdicts_on(scaled(1.0), chosen, remedy=True)
    *_, claim = strangers.claims([found], chosen, {"tunix_trainer": "why"}, ORACLE)
    assert (claim.verdict, claim.why_not) == ("not judged", "why")
    assert "tunix_trainer" in claim.text


def test_tables_have_a_row_for_each_use(steps, tmp_path):
    """On the terminal, in Markdown and in the picture."""
    chosen = [steps[name] for name in SETTINGS]
    both = [
        verdicts_on(rule(MEAN_OF_MEANS), chosen),
        verdicts_on(scaled(1.0), chosen),
    ]
    header, *body = showing.rows(both)
    assert header == ["stranger", "used with", *SETTINGS, "verdict", "lines"]
    assert [row[3].endswith("off") for row in body] == [True, False]
    (row,) = showing.wrong(both)[1:]
    assert row == [MEAN_OF_MEANS, "padded", "planted: a use"]
    console = Console(file=StringIO(), width=80)
    console.print(showing.table(both))
    shown = console.file.getvalue().splitlines()
    assert [line.count("right") for line in shown if "right" in line] == [2, 3]
    assert body[0][3].removesuffix(" off") in shown[1]
    figure = showing.picture(both)
    assert len(figure.axes[0].texts) == 6
    showing.page(tmp_path / "page.md", both, {"optax": "0.2.8"}, "the command")
    page = (tmp_path / "page.md").read_text()
    assert "`the command`, with optax 0.2.8." in page
    assert page.count("[source](link)") == 2


# --- lines ---


def test_lines_of_code_are_counted_not_those_of_prose(tmp_path, monkeypatch):
    """Of the section for the judge alone."""
    source = '''"""A module."""

x = 1

# --- what the judge needs ---

NAMES = {  # Two lines
    "a": "b"}


def read(model):
    """The gradient.

    Args:
      model: Its model.
    """
    # A reason.
    text = """of
    two lines"""

    return model, text

# --- what is on trial ---

USES = ()
'''
    (tmp_path / "a_planted_stranger.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    planted = importlib.import_module("a_planted_stranger")
    assert stranger.lines(planted) == 6
    shared = stranger.lines(flax_optimizer)
    assert shared > 6
    # As by an import: what it shares with another stranger is needed as well.
    planted.flax_optimizer = flax_optimizer
    assert stranger.lines(planted) == 6 + shared


# --- the real ones ---

HERE = ("optax_multisteps", "flax_optimizer")
MEANS = {"equal": "right", "padded": "wrong", "short end": "no step"}


@pytest.mark.parametrize("name", HERE)
def test_strangers_that_are_here_get_the_verdict_of_arithmetic(steps, name):
    """An average of averages is right where parts are equal; a remedy everywhere."""
    for each in importlib.import_module(f"experiments.strangers.{name}").USES:
        found = {setting: judged(each, steps[setting]) for setting in SETTINGS}
        wanted = dict.fromkeys(SETTINGS, "right") if each.remedy else MEANS
        assert {k: f.verdict for k, f in found.items()} == wanted
        if not each.remedy:
            assert found["padded"].rule == MEAN_OF_MEANS


ELSEWHERE = [name for name in trial.TRAINERS if name not in HERE]
OVERS = {"accelerate_loop", "lightning_trainer"}


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_other_stranger_is_judged(steps, name):
    """Those of torch, Keras and Tunix, where they are installed."""
    if missing := trial.absent(name):
        pytest.skip(f"{', '.join(missing)} not installed: {trial.INSTALL}")
    tried = [steps[s] for s in (*SETTINGS, *problem.OPTIONS)]
    verdicts = list(trial.tried([name], tried, lambda _: None))
    found = [f for verdict in verdicts for f in verdict.judged]
    assert all(f.rule for f in found if f.verdict != "right")
    assert any(verdict.findings[0].verdict == "right" for verdict in verdicts)
    for verdict in verdicts:
        if verdict.use.remedy:
            assert verdict.word == "right"
    if name in OVERS:
        assert verdicts[0].findings[2].factor == pytest.approx(2 / 3, rel=1e-5)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_a_mixture_counts_its_load_loss_for_each_micro_batch(tmp_path):
    """The library's own model, with one micro-batch three times: torch's gradient of
    its loss has three times too much of what the load loss adds."""
    if missing := trial.absent("huggingface_trainer"):
        pytest.skip(f"{', '.join(missing)} not installed: {trial.INSTALL}")
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=3,
        num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.randint(1, 13, (4, 9))

    def gradient():
        """A copy of each leaf, in float64."""
        return {
            name: np.asarray(leaf.grad.numpy(), np.float64)
            for name, leaf in model.named_parameters()
        }

    def with_load_loss(factor):
        model.router_aux_loss_coef = factor
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return gradient()

    none, once = with_load_loss(0.0), with_load_loss(0.5)

    class Reader(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.shown = gradient()

    reader = Reader()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4,
        gradient_accumulation_steps=3, num_train_epochs=1, optim="sgd",
        train_sampling_strategy="sequential", max_grad_norm=0.0, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for _ in range(3) for row in tokens]
    model.zero_grad()
    transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[reader]
    ).train()
    for name, leaf in once.items():
        thrice = none[name] + 3 * (leaf - none[name])
        np.testing.assert_allclose(reader.shown[name], thrice, rtol=1e-4, atol=1e-6)
    router = "model.layers.0.mlp.gate.weight"
    assert np.abs(once[router] / none[router] - 1).max() > 0.1
