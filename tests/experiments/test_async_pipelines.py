"""The claims of `async_pipelines` are false where the figures are; and its parts."""

import json

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import async_pipelines as job
from experiments._asynchronous import compiled, language, study, task
from experiments._asynchronous.images import Images, convolve
from experiments._asynchronous.language import Language
from experiments._asynchronous.study import Found, Study

TINY = Language(width=4, halves=4, length=5, batch=3, steps=3, test=2)
SMALL = Study(TINY, (2, 4), (study.SYNC, study.STASH), seeds=2, tuning=1, rates=2)


@pytest.fixture(autouse=True)
def _as_the_experiments_run():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def found(*losses):
    """Runs whose second learning rate is the best."""
    tuned = np.array([[9.0, 9.0], [2.0, 2.1], [np.nan, 1.0]])
    return Found((0.1, 0.2, 0.3), tuned, np.array(losses), np.array([5.0, 4.0, 3.0]))


LOW, HIGH = found(2.0, 2.1, 1.9), found(2.5, 2.7, 2.4)
BROKEN = found(2.0, np.nan, 1.9)

# --- orders ---


def test_lower_is_more_than_the_seeds_vary():
    """By seed: both have the same weights and batches."""
    assert job.is_lower(LOW, HIGH)
    assert not job.is_lower(HIGH, LOW)
    assert not job.is_lower(LOW, LOW)
    assert not job.is_lower(found(2.0, 2.3, 1.8), found(2.1, 2.2, 1.9))
    # The same differences from seed to seed, however far the seeds are apart.
    assert job.is_lower(found(1.0, 5.0, 9.0), found(1.1, 5.11, 9.1))
    assert not job.is_lower(found(1.0), found(2.0))


def test_few_seeds_need_more_than_two_standard_errors():
    """Student's quantile at 0.975 is 4.30 for three of them, and 2.78 for five."""
    for count, quantile in ((3, 4.303), (5, 2.776)):
        spread = np.linspace(-1, 1, count)
        error = spread.std(ddof=1) / np.sqrt(count)
        assert job.surely_positive(spread + 1.001 * quantile * error)
        assert not job.surely_positive(spread + 0.999 * quantile * error)


def test_what_diverged_is_higher():
    assert job.is_lower(LOW, BROKEN)
    assert not job.is_lower(BROKEN, LOW)
    assert not job.is_lower(BROKEN, BROKEN)
    assert job.told(BROKEN.losses) == "1 of 3 diverged"
    assert job.told(LOW.losses) == "2.0000 ± 0.1000"
    assert job.told(LOW.losses, "+") == "+2.0000 ± 0.1000"


def test_the_best_rate_has_the_smallest_mean_of_the_seeds_that_tune():
    """Whatever the seeds that are shown lose."""
    assert LOW.best == BROKEN.best == 1
    assert not LOW.is_at_edge
    first = LOW._replace(tuned=np.array([[1.0, 2.0], [2.0, 2.1], [np.nan, 1.0]]))
    assert first.best == 0
    assert first.is_at_edge
    assert LOW._replace(tuned=LOW.tuned[:2], rates=LOW.rates[:2]).is_at_edge
    assert not LOW._replace(tuned=LOW.tuned[:1], rates=LOW.rates[:1]).is_at_edge


ALL = Study(TINY, (2, 4), tuple(study.METHODS), seeds=3, tuning=2, rates=1)
ORDERED = {
    (study.SYNC, 2): found(1.0, 1.1, 0.9),
    (study.STASH, 2): LOW,
    (study.STASH, 4): HIGH,
    (study.NONE, 4): found(3.0, 3.3, 2.9),
    (study.XPIPE, 4): found(2.3, 2.4, 2.2),
    (study.PIPEOPTIM, 4): found(2.3, 2.45, 2.2),
    (study.ROTATION, 4): found(2.2, 2.4, 2.1),
    (study.NESTEROV, 4): found(2.3, 2.4, 2.1),
    (study.TWO, 2): found(1.5, 1.7, 1.4),
    (study.FEEDBACK, 2): found(1.3, 1.4, 1.1),
    (study.MUON, 2): found(1.0, 1.1, 0.9),
    (study.MUON_TWO, 2): found(1.1, 1.2, 1.0),
}


def verdicts(runs, why=""):
    return [claim.holds for claim in job.order_claims("text", ALL, runs, why)]


def test_reported_orders_hold_where_the_figures_have_them():
    count = len(job.ORDERS) + 1
    assert verdicts(ORDERED) == [True] * count
    assert verdicts(ORDERED, "it is quick") == [None] * count
    assert verdicts({}) == [None] * count
    claims = list(job.order_claims("text", ALL, ORDERED, ""))
    assert claims[0].measured == (
        "PipeDream in 2: 2.0000 ± 0.1000; PipeDream in 4: 2.5333 ± 0.1528; "
        "paired +0.5333 ± 0.0577"
    )
    assert claims[-1].measured == (
        "Adam +0.5333 ± 0.0577, Muon +0.1000 ± 0.0000; paired +0.4333 ± 0.0577"
    )


@pytest.mark.parametrize("number", range(len(job.ORDERS)))
def test_an_order_whose_reverse_is_found_is_refuted(number):
    """Each by itself: its two methods change places. Three papers are not refuted."""
    order = job.ORDERS[number]
    low, high = (job._at(ALL, *place) for place in (order.lower, order.higher))
    runs = ORDERED | {low: ORDERED[high], high: ORDERED[low]}
    claim = list(job.order_claims("text", ALL, runs, ""))[number]
    if len(order.sources) >= 3:
        assert claim.holds is False
    else:
        assert claim.holds is None
        assert claim.why_not == "refuted: the reverse holds"


def test_what_the_seeds_do_not_decide_is_left_open():
    """Here two of three seeds say so, and one the contrary."""
    runs = ORDERED | {(study.STASH, 4): found(1.95, 2.2, 2.0)}
    claim = next(job.order_claims("text", ALL, runs, ""))
    assert claim.holds is None
    assert claim.why_not == "the seeds' differences do not decide it"


def test_muon_may_lose_more_than_adam():
    runs = ORDERED | {(study.MUON_TWO, 2): found(2.0, 2.2, 1.9)}
    *_, claim = job.order_claims("text", ALL, runs, "")
    assert claim.why_not == "refuted: the reverse holds"


# --- the study ---


def test_a_study_goes_on_where_it_was(tmp_path):
    """With the same sizes, seeds and rates only; and what diverged comes back."""
    first, read = study.resumed(SMALL, tmp_path, study.STASH, 2)
    assert not read
    again, read = study.resumed(SMALL, tmp_path, study.STASH, 2)
    assert read
    for name in study.ARRAYS:
        kept = getattr(again, name)
        assert np.array_equal(getattr(first, name).astype(np.float64), kept)
    assert first.tuned.shape == (2, 1)
    assert first.losses.shape == (2,)
    assert first.rates == again.rates == (0.001, 0.003)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"losses": [None, 2.0]}))
    broken, _ = study.resumed(SMALL, tmp_path, study.STASH, 2)
    assert np.isnan(broken.losses[0])
    assert study.written(broken.losses) == [None, 2.0]
    changes = ({"seed": 1}, {"tuning": 2}, {"task": TINY._replace(steps=2)})
    for changed in changes:
        _, read = study.resumed(SMALL._replace(**changed), tmp_path, study.STASH, 2)
        assert not read


def form_of_stages(name, stages):
    """A method's runs by the form in which stages are stages: loss and losses."""
    program, made = study.program_of(name, TINY, stages), task.staged(TINY, stages)
    held_out = TINY.held_out()

    @jax.jit
    def run(params, data, rate):
        ended = program(params, data, rate)
        value = held_out["tokens"]
        for stage, own in zip(made, ended.params, strict=True):
            value = stage.fn(own, value)
        return TINY.losses(value, held_out).mean(), ended.losses

    def alone(rate, seed):
        cut = task.cut(TINY.parameters(seed), stages)
        return run(cut, TINY.training(seed), rate)

    return alone


# Without basis rotation: between equal eigenvalues rounding chooses bases, and a unit
# in the last place of the weights changes a loss by 1e-3 of it.
BY_STAGES = [
    name
    for name, method in study.METHODS.items()
    if method.by_stages and name != study.ROTATION
]


@pytest.mark.parametrize("name", BY_STAGES)
def test_runs_are_what_they_are_alone_in_stages(name):
    """With the halves of a stage as stages, mapped over seeds and rates."""
    both, alone = study.trained(SMALL, name, 2), form_of_stages(name, 2)
    runs = [alone(both.rates[both.best], seed) for seed in (0, 1)]
    np.testing.assert_allclose(both.losses, [x for x, _ in runs], rtol=1e-5)
    curve = np.mean([x for _, x in runs], axis=0)
    np.testing.assert_allclose(both.curve, curve, rtol=1e-5)
    tuned = [alone(rate, 2)[0] for rate in both.rates]
    np.testing.assert_allclose(both.tuned[:, 0], tuned, rtol=1e-5)
    assert runs[0][0] != runs[1][0]


def test_an_order_that_does_not_fit_is_refused():
    program = study.program_of_halves(TINY, study.ADAM([{}]), 3)
    assert program.kept == (3, 3, 3, 3)
    order = program.order_of(study.versions_of("stashing", 2, 3))
    assert [(place.stage, place.delay) for place in order.places] == [
        (0, 1), (0, 1), (1, 0), (1, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="must divide the stages: 3 rows, 4 stages"):
        program.order_of(study.versions_of("stashing", 3, 3))
    short = compiled.Program(
        task.staged(TINY, 2), TINY.losses, study.ADAM([{}]), np.array([[0, 1, 2]] * 2)
    )
    with pytest.raises(ValueError, match="stage 1 keeps 1, delay 2"):
        short.order_of(np.array([[0, 1, 2], [0, 1, 0]]))


def test_cases_are_once_where_stages_do_not_matter():
    expected = [(study.SYNC, 2), (study.STASH, 2), (study.STASH, 4)]
    assert SMALL.cases() == expected
    assert SMALL._replace(rates=3).grid(study.SGD) == (0.003, 0.01, 0.03)
    assert {len(method.rates) for method in study.METHODS.values()} == {7}


def test_versions_of_methods():
    one = study.versions_of("2bw", 3, 4)
    assert np.array_equal(one, [[0, 0, 1, 2]] * 3)
    assert np.array_equal(study.versions_of("flush", 2, 3), [[0, 1, 2]] * 2)
    late = study.versions_of("stashing", 3, 5)
    assert late.tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]


# --- the task ---


PICTURES = Images(width=3, halves=4, batch=5, steps=3)


@pytest.mark.parametrize("given", [TINY, PICTURES])
def test_stages_in_turn_are_the_model(given):
    """However it is cut: each half and both ends once, in order."""
    parts, held_out = given.parameters(3), given.held_out()
    found = []
    for stages in (1, 2, 4):
        value = held_out[given.input]
        cut = task.cut(parts, stages)
        for stage, own in zip(task.staged(given, stages), cut, strict=True):
            value = stage.fn(own, value)
        found.append(value)
        assert [piece for own in cut for piece in own] == parts
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5)
    losses = given.losses(found[0], held_out)
    assert losses.shape == held_out[given.input].shape[:1]
    # A network that has not learnt is about as good as guessing.
    classes = found[0].shape[-1]
    assert abs(losses.mean() / np.log(classes) - 1) < 0.5
    with pytest.raises(ValueError, match="4 halves must be a multiple of 3 stages"):
        task.cut(parts, 3)


def test_attention_looks_back_only():
    own = TINY.parameters(0)[1]
    h = np.random.default_rng(0).normal(size=(1, 5, 4)).astype(np.float32)
    changed = h.copy()
    changed[0, 3] += 1
    before, after = (language.attend(own, x, heads=2) for x in (h, changed))
    assert np.array_equal(before[0, :3], after[0, :3])
    assert not np.allclose(before[0, 3:], after[0, 3:])


def test_products_are_a_convolution():
    """JAX's own, of what precedes it; padded by zeros."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 4, 4, 3)).astype(np.float32)
    kernel = rng.normal(size=(27, 3)).astype(np.float32)
    before = jax.nn.relu(task.normed(h))
    layout = ("NHWC", "HWIO", "NHWC")
    expected = h + jax.lax.conv_general_dilated(
        before, kernel.reshape(3, 3, 3, 3), (1, 1), "SAME", dimension_numbers=layout
    )
    found = convolve({"kernel": kernel}, h)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_images_that_are_held_out_are_not_trained_with():
    data, other = PICTURES.training(5), PICTURES.held_out()
    assert data.batch["images"].shape == (3, 5, 8, 8, 1)
    assert len(other["images"]) == 359
    many = PICTURES._replace(steps=200).training(5).batch["images"]
    shown = {image.tobytes() for image in many.reshape(-1, 64)}
    assert len(shown) > 500
    assert not shown & {image.tobytes() for image in other["images"].reshape(-1, 64)}
    assert not np.array_equal(
        data.batch["labels"], PICTURES.training(6).batch["labels"]
    )


def test_targets_are_the_next_characters_of_text():
    """Of the first nine tenths; what is held out is not among them."""
    whole = language.text()
    assert whole.max() < language.VOCABULARY
    assert (whole > 0).mean() > 0.9
    data = TINY.training(5)
    shown = data.batch["tokens"]
    assert shown.shape == (3, 3, 5)
    assert np.array_equal(shown[..., 1:], data.batch["targets"][..., :-1])
    np.testing.assert_allclose(data.weights.sum(1), 1, rtol=1e-6)
    assert not np.array_equal(shown, TINY.training(6).batch["tokens"])
    start = whole[len(whole) * 9 // 10 :].tobytes()
    for row in TINY.held_out()["tokens"]:
        assert row.astype(np.uint8).tobytes() in start


def test_notes_name_the_methods_of_each_grid_and_rates_at_its_edge():
    given = ALL._replace(methods=(study.TWO, study.SGD, study.DC, study.LOOK_AHEAD))
    given = given._replace(rates=3)
    runs = {(study.TWO, 2): LOW, (study.DC, 4): LOW}
    told = list(job.notes(given, runs, 0))
    assert told[1:] == [
        "learning rates 0.001, 0.003, 0.01: 2BW.",
        "learning rates 0.003, 0.01, 0.03: SGD, synchronous; SGD, DC-ASGD-a.",
        "learning rates 0.03, 0.1, 0.3: SGD, Nesterov (10).",
        "2 seeds choose a learning rate for each method and number of stages; 3 "
        "others are shown: other weights and batches.",
        "best rates at an edge of their grid: none.",
    ]
    runs[study.DC, 4] = LOW._replace(tuned=-LOW.tuned)
    *_, edges, last = job.notes(given, runs, 3)
    assert edges == "best rates at an edge of their grid: SGD, DC-ASGD-a in 4 (0.1)."
    assert last == "3 of 6 results were read from an earlier call."


def test_each_method_is_in_one_family():
    """And each of a family has its own colour or dashes."""
    names = [name for own in job.FAMILIES.values() for name in own]
    assert sorted(names) == sorted(study.METHODS)
    for own in job.FAMILIES.values():
        assert len(set(own) - set(job.REFERENCES)) <= len(job.STYLES)


def test_a_picture_has_every_method_and_the_references_in_each_column():
    runs = dict.fromkeys(ALL.cases(), LOW)
    figure = job.plot(ALL, runs)
    try:
        axes = np.array(figure.axes).reshape(3, len(job.FAMILIES))
        for column, own in zip(axes.T, job.FAMILIES.values(), strict=True):
            texts = column[-1].get_legend().get_texts()
            shown = {text.get_text() for text in texts}
            assert shown == {*own, *job.REFERENCES}
    finally:
        plt.close(figure)


# --- time and memory ---


@pytest.mark.parametrize("stages", [2, 5, 8])
def test_seconds_are_those_of_the_formulas(stages):
    """A flush has its bubble in each update; the others are always at work."""
    ends, halves = ((0.0, 0.0),), ((0.25 / stages, 0.5 / stages),) * (4 * stages)
    pieces = ends + halves + ends
    busy = 3 / stages
    for versions in ("stashing", "vertical_sync", "2bw"):
        assert job.seconds(versions, stages, pieces) == pytest.approx(busy)
    flush = busy * (2 * stages - 1) / stages
    assert job.seconds("flush", stages, pieces) == pytest.approx(flush)
    # The slowest stage has the head.
    slow = (*ends, *halves, (0.5, 1.0))
    assert job.seconds("stashing", stages, slow) == pytest.approx(busy + 1.5)


def test_a_profile_is_measured_by_piece():
    """In units of the whole forward pass."""
    pieces = job.profiled(TINY)
    assert len(pieces) == TINY.halves + 2
    assert sum(forward for forward, _ in pieces) == pytest.approx(1)
    assert min(backward for _, backward in pieces) > 0


def test_memory_of_methods():
    """Versions by stage; PipeMare keeps one more copy beside Adam's two."""
    by_name = {
        name: job.memory(name, TINY._replace(steps=8), 4)
        for name in (study.SYNC, study.STASH, study.PIPEMARE, study.TWO, study.FEEDBACK)
    }
    versions = {name: [x.versions for x in own] for name, own in by_name.items()}
    assert versions == {
        study.SYNC: [1] * 4,
        study.STASH: [4, 3, 2, 1],
        study.PIPEMARE: [1] * 4,
        study.TWO: [2] * 4,
        study.FEEDBACK: [2] * 4,
    }
    copies = [own.state - by_name[study.SYNC][j].state for j, own in
              enumerate(by_name[study.PIPEMARE])]  # fmt: skip
    assert copies == [own.weights for own in by_name[study.PIPEMARE]]


def test_the_loss_in_equal_time_is_that_of_fewer_updates():
    """Where an update takes twice as long, of half as many."""
    runs = LOW._replace(curve=np.arange(40.0))
    assert job.in_time(runs, 0.3, 0.1 + 0.2) == job.smoothed(runs.curve)[-1]
    assert job.in_time(runs, 2.0, 1.0) == job.smoothed(runs.curve)[19]
    assert job.in_time(runs, 100.0, 1.0) == job.smoothed(runs.curve)[0]


def test_rows_say_what_a_method_keeps_and_takes(monkeypatch):
    halves = ((1 / TINY.halves, 2 / TINY.halves),) * TINY.halves
    monkeypatch.setattr(job, "profiled", lambda _: ((0.0, 0.0), *halves, (0.0, 0.0)))
    given = Study(TINY._replace(steps=8), (2, 4), (study.SYNC, study.STASH), 2, 1, 1)
    runs = {(study.SYNC, 2): LOW, (study.STASH, 4): HIGH}
    head, flush, late = job.rows(given, runs)
    assert dict(zip(head, flush, strict=True)) | {"bytes": ""} == {
        "method": "synchronous", "optimizer": "Adam", "stages": "any, as of 4",
        "rate": "0.2", "held-out loss": "2.0000 ± 0.1000", "seconds": "1.312",
        "in equal time": "5.000", "versions": "1", "bytes": "",
    }  # fmt: skip
    assert late[5:8] == ["0.750", "4.000", "4"]


def test_curves_are_smoothed_over_their_last_updates():
    curve = np.arange(40.0)
    smooth = job.smoothed(curve)
    assert smooth[:3].tolist() == [0.0, 0.5, 1.0]
    assert smooth[-1] == curve[-job.SMOOTHED :].mean()


# --- the executor ---


def test_the_compiled_form_has_the_bits_of_the_executor():
    """Also of fewer updates than the claim asks for."""
    claim = job.executor_claim("it", TINY)
    assert claim.holds
    assert claim.measured.endswith("arrays after 3 updates in 4 stages")
