"""The claims of `async_pipelines` are false where the figures are; and its parts."""

import json

import jax
import numpy as np
import pytest

from experiments import async_pipelines as job
from experiments._asynchronous import language, study, task
from experiments._asynchronous.images import Images, convolve
from experiments._asynchronous.language import Language
from experiments._asynchronous.study import Found, Study

TINY = Language(width=4, halves=4, length=5, batch=3, steps=3, test=2)
SMALL = Study(TINY, (2, 4), (study.SYNC, study.STASH), seeds=2, rates=1)


@pytest.fixture(autouse=True)
def _as_the_experiments_run():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def found(*losses, other=9.0):
    """Runs whose second learning rate is the best."""
    final = np.array([[other] * len(losses), losses])
    return Found((0.1, 0.2), final, np.array([5.0, 4.0, 3.0]))


LOW, HIGH = found(2.0, 2.1, 1.9), found(2.5, 2.7, 2.4)
BROKEN = found(2.0, np.nan, 1.9, other=np.nan)

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


def test_what_diverged_is_higher():
    assert job.is_lower(LOW, BROKEN)
    assert not job.is_lower(BROKEN, LOW)
    assert not job.is_lower(BROKEN, BROKEN)
    assert job.told(BROKEN) == "diverged"
    assert job.told(LOW) == "2.0000 ± 0.1000"


def test_the_best_rate_has_the_smallest_mean():
    assert LOW.best == 1
    assert found(2.0, 2.1, other=1.0).best == 0
    assert found(2.0, np.nan, other=50.0).best == 0


ALL = Study(TINY, (2, 4), tuple(study.METHODS), seeds=3, rates=1)
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
        "PipeDream in 2: 2.0000 ± 0.1000; PipeDream in 4: 2.5333 ± 0.1528"
    )
    assert claims[-1].measured == "Adam +0.5333, Muon +0.1000"


@pytest.mark.parametrize("number", range(len(job.ORDERS)))
def test_an_order_that_is_not_found_is_a_claim_that_fails(number):
    """Each by itself: its two methods change places."""
    order = job.ORDERS[number]
    low, high = (job._at(ALL, *place) for place in (order.lower, order.higher))
    runs = ORDERED | {low: ORDERED[high], high: ORDERED[low]}
    assert verdicts(runs)[number] is False


def test_what_the_seeds_do_not_decide_is_left_open():
    """Here two of three seeds say so, and one the contrary."""
    runs = ORDERED | {(study.STASH, 4): found(1.95, 2.2, 2.0)}
    claim = next(job.order_claims("text", ALL, runs, ""))
    assert claim.holds is None
    assert claim.why_not == "the seeds' differences do not decide it"


def test_muon_may_lose_more_than_adam():
    runs = ORDERED | {(study.MUON_TWO, 2): found(2.0, 2.2, 1.9)}
    assert verdicts(runs)[-1] is False


# --- the study ---


def test_a_study_goes_on_where_it_was(tmp_path):
    """With the same sizes, seeds and rates only; and what diverged comes back."""
    first, read = study.resumed(SMALL, tmp_path, study.STASH, 2)
    assert not read
    again, read = study.resumed(SMALL, tmp_path, study.STASH, 2)
    assert read
    assert np.array_equal(first.final.astype(np.float64), again.final)
    assert np.array_equal(first.curve.astype(np.float64), again.curve)
    assert first.rates == again.rates == (0.003,)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"final": [[None, 2.0]]}))
    broken, _ = study.resumed(SMALL, tmp_path, study.STASH, 2)
    assert np.isnan(broken.final[0, 0])
    assert study.written(broken.final) == [[None, 2.0]]
    for changed in ({"seed": 1}, {"task": TINY._replace(steps=2)}):
        _, read = study.resumed(SMALL._replace(**changed), tmp_path, study.STASH, 2)
        assert not read


def test_seeds_are_the_runs_that_they_are_alone():
    """And a study that begins with a later seed has its results."""
    both = study.trained(SMALL, study.SYNC, 2)
    alone = study.trained(SMALL._replace(seeds=1, seed=1), study.SYNC, 2)
    np.testing.assert_allclose(both.final[:, 1:], alone.final, rtol=1e-5)
    assert both.final[0, 0] != both.final[0, 1]


def test_cases_are_once_where_stages_do_not_matter():
    expected = [(study.SYNC, 2), (study.STASH, 2), (study.STASH, 4)]
    assert SMALL.cases() == expected
    assert SMALL._replace(rates=3).grid(study.SGD) == (0.01, 0.03, 0.1)
    assert {len(method.rates) for method in study.METHODS.values()} == {6}


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


def test_notes_name_the_methods_of_each_grid():
    given = ALL._replace(methods=(study.TWO, study.SGD, study.DC, study.LOOK_AHEAD))
    told = [note for note in job.notes(given._replace(rates=2), 0) if "rates" in note]
    assert told == [
        "learning rates 0.003, 0.01: 2BW.",
        "learning rates 0.03, 0.1: SGD, synchronous; SGD, DC-ASGD-a.",
        "learning rates 0.3, 1: SGD, Nesterov (10).",
    ]
    (*_, last) = job.notes(given, 3)
    assert last == "3 of 6 results were read from an earlier call."


# --- time and memory ---


@pytest.mark.parametrize("stages", [2, 5, 8])
def test_seconds_are_those_of_the_formulas(stages):
    """A flush has its bubble in each update; the others are always at work."""
    busy = 3 / stages
    for versions in ("stashing", "2bw"):
        assert job.seconds(versions, stages) == pytest.approx(busy)
    flush = busy * (2 * stages - 1) / stages
    assert job.seconds("flush", stages) == pytest.approx(flush)


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
    runs = found(2.0, 2.1)._replace(curve=np.arange(40.0))
    assert job.in_time(runs, 0.3, 0.1 + 0.2) == job.smoothed(runs.curve)[-1]
    assert job.in_time(runs, 2.0, 1.0) == job.smoothed(runs.curve)[19]
    assert job.in_time(runs, 100.0, 1.0) == job.smoothed(runs.curve)[0]


def test_rows_say_what_a_method_keeps_and_takes():
    given = Study(TINY._replace(steps=8), (2, 4), (study.SYNC, study.STASH), 2, 1)
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
