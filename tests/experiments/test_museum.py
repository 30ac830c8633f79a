"""The museum's own parts: its exhibits' words, its claims and its pages."""

from dataclasses import replace
from io import StringIO

import jax
import pytest
from rich.console import Console

from experiments import museum
from experiments.museum import exhibit, judging, showing
from experiments.museum.judging import Finding, Verdict

LABELS = exhibit.names()
SHOWN = [label for label in LABELS if not exhibit.missing(label)]


@pytest.fixture(autouse=True)
def _as_the_experiments_run():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


# --- exhibits ---


def test_there_are_exhibits_of_every_kind():
    kinds = [label.partition("/")[0] for label in LABELS]
    assert len(LABELS) >= 30
    assert list(dict.fromkeys(kinds)) == list(exhibit.KINDS)
    assert kinds.count("torch_trainers") >= 4
    assert kinds.count("processes") == 2
    assert set(museum.QUICK) <= set(LABELS)


@pytest.mark.parametrize("label", SHOWN)
def test_an_exhibit_says_what_it_is(label):
    """In words of its own: a title, a story, a thread, a claim, a place."""
    shown = exhibit.load(label)
    assert len(shown.title) < 90
    assert len(shown.story.split()) > 15
    assert shown.thread.startswith("https://github.com/")
    assert shown.claim.endswith(".")
    assert shown.expected
    assert all(isinstance(each, str) and each.strip() for each in shown.expected)
    assert shown.module.buggy.__doc__ == shown.module.fixed.__doc__
    assert 0 < shown.glue < 40


def test_threads_are_published_once():
    threads = [exhibit.load(label).thread for label in SHOWN]
    assert len(set(threads)) == len(threads)


# --- verdicts ---


def verdict(label, buggy=("WRONG",), fixed=("right",), **options):
    """A verdict on an exhibit, with made-up reports."""
    caught, passes = options.get("caught", True), options.get("passes", True)
    return Verdict(
        exhibit.load(label),
        Finding(not caught, caught, tuple(buggy), 1.0),
        Finding(passes, options.get("condemned", False), tuple(fixed), 2.0),
        4.0,
    )


ONE, OTHER = "pipelines/raw_sum", "replicas/averaged_after_totals"


def place(label):
    """A line that names the place of an exhibit."""
    return " ... ".join(exhibit.load(label).expected)


def test_a_place_is_named_by_one_line():
    assert exhibit.names_the_place(("a", "b"), ["c", "b a"])
    assert not exhibit.names_the_place(("a", "b"), ["a", "b"])


def test_a_place_that_another_report_names_is_not_named():
    """Neither that of the fixed form, nor that of another exhibit."""
    one = verdict(ONE, buggy=[place(ONE)])
    assert one.named
    assert not replace(one, fixed=replace(one.fixed, lines=(place(ONE),))).named
    other = verdict(OTHER, buggy=[place(OTHER), place(ONE)])
    first, second = judging.compared([one, other])
    assert first.confused == (OTHER,)
    assert not first.named
    assert second.named


def claimed(*verdicts, absent=(), quick=False):
    lacking = dict.fromkeys(absent, "torch")
    found = museum.claims(verdicts, lacking, quick)
    return [claim.verdict for claim in found]


def test_planted_verdicts_make_the_claims_fail():
    right = verdict(ONE, buggy=[place(ONE)])
    assert claimed(right) == ["holds"] * 4
    assert claimed(verdict(ONE, buggy=[place(ONE)], caught=False))[0] == "does not hold"
    unjudged = verdict(ONE, buggy=[place(ONE)], passes=False)
    assert claimed(unjudged) == ["holds", "holds", "does not hold", "holds"]
    condemned = verdict(ONE, buggy=[place(ONE)], passes=False, condemned=True)
    assert claimed(condemned)[1:3] == ["does not hold"] * 2
    misnamed = verdict(OTHER)
    assert claimed(right, misnamed)[3] == "does not hold"
    assert claimed(*[right] * 9, misnamed)[3] == "holds"
    assert claimed(right, misnamed, quick=True)[3] == "not judged"
    assert claimed(right, absent=["torch_trainers/own_counts"])[4:] == ["not judged"]


def test_the_table_and_the_pages_are_made_of_the_programs_words(tmp_path):
    right = verdict(ONE, buggy=["WRONG", "x" * 300])
    console = Console(file=StringIO(), width=80)
    console.print(showing.table([right]))
    assert console.file.getvalue().splitlines()[1].split() == [
        ONE, "yes", "no", "yes", str(right.exhibit.glue), "7",
    ]  # fmt: skip
    assert len(showing.picture([right]).axes[0].get_yticks()) == 1
    showing.index(tmp_path / "index.md", [right])
    linked = f"[{ONE}](pipelines-raw_sum.md)"
    assert linked in (tmp_path / "index.md").read_text()
    showing.page(tmp_path / showing.file(right), right)
    text = (tmp_path / "pipelines-raw_sum.md").read_text()
    assert text.startswith(
        "# The pipeline differentiates the sum of the token losses\n"
    )
    for part in (
        right.exhibit.story, right.exhibit.claim, f"<{right.exhibit.thread}>",
        "def buggy(tokens: Tree)", "def fixed(tokens: Tree)", "def trainer(part",
        "caught, place not named", "The fixed form: passes", f"{'x' * 200} ...",
    ):  # fmt: skip
        assert part in text
    assert "judge" not in text.partition("The trainer around both")[2].split("##")[0]


def test_lines_that_exhibits_share_count_for_each():
    """A judge of the model's own module is glue as well."""
    shared, own = exhibit.load(ONE), exhibit.load("pipelines/forgotten_micro_batches")
    assert shared.glue > 1
    assert own.glue == 5


def test_an_exhibit_of_a_package_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(exhibit, "find_spec", lambda name: None)
    assert exhibit.missing("torch_trainers/own_counts") == "torch"
    assert exhibit.missing(ONE) == ""


# --- the judge itself ---

CHOSEN = (
    "pipelines/raw_sum", "replicas/sum_of_losses", "replicas/processes_for_replicas",
)  # fmt: skip


@pytest.mark.parametrize("label", CHOSEN)
def test_the_judge_catches_and_names(label):
    """Exhibits that share a reference; the quick form shows others."""
    found = judging.verdict(exhibit.load(label))
    assert (found.caught, found.named, found.passes) == (True, True, True)


@pytest.mark.parity
@pytest.mark.parametrize(
    "label", [label for label in LABELS if label.startswith("torch_trainers/")]
)
def test_torch_trainers_are_caught_and_their_fixed_forms_pass(label):
    pytest.importorskip("torch")
    found = judging.verdict(exhibit.load(label))
    assert (found.caught, found.passes) == (True, True)
