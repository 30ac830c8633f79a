"""The report: what counts as right, wrong and not judged, and how it is told."""

import ast
import dataclasses
import io
import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import rich.console
from rich.console import Console

from jdist import VerificationError
from jdist.verify import LeafReport, Report, Score, gradients
from jdist.verify.report import _COLUMNS as COLUMNS
from jdist.verify.report import _DROPPED as DROPPED
from jdist.verify.report import (
    SUSPICIOUSLY_LOOSE,
    Attribution,
    OracleCheck,
    looseness,
)

FIELD = ast.AnnAssign
EQUAL = LeafReport("mine", "w", "float32", (2, 3), 1e-8, 1e-7, 2.0, 0.25, 0.75)
SAME = dataclasses.replace(EQUAL, path="b", max_abs=0.0, max_ulp=0.0, ratio=0.0)
WRONG = dataclasses.replace(EQUAL, path="v", ratio=31.0, problem="off by 31 times")
HIDDEN = dataclasses.replace(EQUAL, path="u", unjudged="zero would pass too")
PINNED = OracleCheck(1.0, 1.0 + 1e-9, 1e-8)
OFF = OracleCheck(1.5, 1.0, 1e-8)
OWN_RULE = OracleCheck(1.5, 1.0, 1e-8, own_rules=("custom_vjp of f",))
SKIPPED = OracleCheck(skipped="the loss is chaotic next to the parameters")


@pytest.mark.parametrize(
    ("leaf", "ok", "bit_equal", "verdict"),
    [
        (EQUAL, True, False, "equal"),
        (SAME, True, True, "bit-equal"),
        (WRONG, False, False, "FAILS"),
        (HIDDEN, False, False, "not judged"),
        (dataclasses.replace(WRONG, unjudged="too"), False, False, "FAILS"),
        (dataclasses.replace(SAME, problem="wrong dtype"), False, False, "FAILS"),
    ],
)
def test_the_verdict_on_a_leaf(leaf, ok, bit_equal, verdict):
    """A problem outweighs what was not judged, and both outweigh equal bits."""
    assert (leaf.ok, leaf.bit_equal, leaf.verdict) == (ok, bit_equal, verdict)
    assert bool(leaf) == ok


@pytest.mark.parametrize(
    ("leaves", "oracle", "ok"),
    [
        ((EQUAL, SAME), None, True),
        ((EQUAL, SAME), PINNED, True),
        ((EQUAL, SAME), SKIPPED, True),
        ((), PINNED, False),
        ((EQUAL, WRONG), PINNED, False),
        ((EQUAL, HIDDEN), PINNED, False),
        ((EQUAL, SAME), OFF, False),
        ((EQUAL, SAME), OWN_RULE, False),
    ],
)
def test_a_report_is_ok_if_everything_was_judged_and_holds(leaves, oracle, ok):
    """The oracle counts where it was compared."""
    report = Report(leaves, oracle)
    assert report.ok == bool(report) == ok
    if ok:
        assert report.raise_if_failed() is report
    else:
        with pytest.raises(VerificationError, match=r"gradients differ|not judged"):
            report.raise_if_failed()


def test_what_has_an_ok_is_true_where_it_is_ok():
    """Or `assert` would pass on every verdict: any other object is true."""
    found = {}
    for path in (Path(__file__).parents[2] / "jdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {x.name: x for x in node.body if hasattr(x, "name")}
                names = {ast.unparse(x.target) for x in node.body if type(x) is FIELD}
                if "ok" in names | methods.keys():
                    own = methods.get("__bool__")
                    found[node.name] = ast.unparse(own.body[-1]) if own else ""
    assert {"Report", "Trace", "Score"} < found.keys()
    assert set(found.values()) == {"return self.ok"}, found


def test_an_assertion_fails_on_a_wrong_gradient():
    """As users of pytest write it."""
    own = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean())
    x = jax.random.normal(jax.random.key(0), (7, 5))

    def judged(factor):
        def scaled(w, x):
            loss, gradient = own(w, x)
            return loss, factor * gradient

        return gradients(lambda w, x: jnp.tanh(x @ w), x[0], x, {"scaled": scaled})

    assert judged(1)
    assert not judged(2)


def test_nothing_compared_is_nothing_right():
    """Nor equal; and the error says what is missing."""
    report = Report((EQUAL,)).of("another")
    assert not report.ok
    assert not report.bit_equal
    assert math.isnan(report.worst)
    with pytest.raises(VerificationError, match="no leaf of any candidate was comp"):
        report.raise_if_failed()


@pytest.mark.parametrize(
    ("check", "ok", "wrong", "text"),
    [
        (PINNED, True, False, "oracle pinned: slope 1 by differentiation"),
        (OFF, False, True, "oracle WRONG: slope 1.5 by differentiation"),
        (SKIPPED, True, False, "oracle not pinned: the loss is chaotic"),
        (OWN_RULE, False, False, "a derivative of its own (custom_vjp of f)"),
        (OracleCheck(1.0, math.nan, 1.0), False, True, "oracle WRONG"),
        (OracleCheck(math.nan, 1.0, math.inf), False, True, "oracle WRONG"),
        (OracleCheck(1.0, 1.5, 0.5), True, False, "oracle pinned"),
        (OracleCheck(1.0, 1.5, 0.25), False, True, "oracle WRONG"),
    ],
)
def test_the_check_of_the_reference(check, ok, wrong, text):
    """NaN is no agreement, whatever the tolerance; the tolerance itself is."""
    assert (check.ok, check.wrong) == (ok, wrong)
    assert bool(check) == ok
    assert text in str(check)


def test_the_error_names_each_leaf_once_and_says_why():
    """What differs first, then what could not be judged; what holds is left out."""
    report = Report((EQUAL, WRONG, HIDDEN, SAME), OFF)
    with pytest.raises(VerificationError, match="gradients differ") as caught:
        report.raise_if_failed()
    wrong, unjudged = str(caught.value).split("\nnot judged:")
    assert wrong.startswith("gradients differ:\n  mine: v: off by 31 times\n  oracle")
    assert unjudged == "\n  mine: u: zero would pass too"
    with pytest.raises(VerificationError, match=r"^not judged:\n  oracle not judged"):
        Report((EQUAL,), OWN_RULE).raise_if_failed()


def test_the_findings_on_one_candidate():
    """With the reference's check and the notes, which are everyone's."""
    other = dataclasses.replace(WRONG, candidate="theirs")
    causes = tuple(Attribution(x, 1, "gradient", "") for x in ("mine", "theirs"))
    report = Report((EQUAL, other, SAME), PINNED, ("a note",), causes)
    mine, theirs = report.of("mine"), report.of("theirs")
    assert mine.leaves == (EQUAL, SAME)
    assert mine.ok
    assert (mine.attributions, theirs.attributions) == (causes[:1], causes[1:])
    assert not theirs.ok
    assert theirs.failures == (other,)
    assert (mine.oracle, mine.notes) == (PINNED, ("a note",))
    assert report.of("nothing").leaves == ()


def test_the_worst_ratio():
    """NaN ranks above every number, infinity too."""
    infinite = dataclasses.replace(WRONG, ratio=math.inf)
    unknown = dataclasses.replace(WRONG, ratio=math.nan)
    assert Report((EQUAL, SAME)).worst == 0.25
    assert Report((EQUAL, infinite, SAME)).worst == math.inf
    assert math.isnan(Report((EQUAL, unknown, infinite)).worst)
    assert not Report((EQUAL, SAME)).bit_equal
    assert Report((SAME, SAME)).bit_equal


def test_json_has_all_of_it_and_reads_back():
    """Numbers in full precision; what JSON has no number for, as text."""
    odd = dataclasses.replace(WRONG, max_rel=math.inf, cosine=math.nan, max_abs=0.1)
    record = json.loads(Report((odd, HIDDEN), SKIPPED, ("a note",)).to_json())
    leaf = record["leaves"][0]
    assert (leaf["max_rel"], leaf["cosine"], leaf["max_abs"]) == ("inf", "nan", 0.1)
    assert leaf["shape"] == [2, 3]
    assert [leaf["verdict"] for leaf in record["leaves"]] == ["FAILS", "not judged"]
    assert record["oracle"]["skipped"].startswith("the loss is chaotic")
    assert record["notes"] == ["a note"]
    assert record["ok"] is False
    assert json.loads(Report((SAME,)).to_json())["oracle"] is None
    assert json.loads(Report((SAME,), OFF).to_json())["oracle"]["slope"] == 1.5


def test_what_is_printed():
    """A line for each leaf, the reasons below, then the oracle and the notes."""
    report = Report((EQUAL, SAME, WRONG, HIDDEN), PINNED, ("mind the gap",))
    console = Console(file=io.StringIO(), width=200)
    console.print(report)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    table = {line.split()[1]: line for line in lines[1:5]}
    assert set(table) == {"w", "b", "v", "u"}
    assert table["w"].split()[2:4] == ["float32", "2x3"]
    assert table["w"].split()[4:] == [
        "1.0e-08",
        "1.0e-07",
        "2",
        "0.25",
        "2e-01",
        "equal",
    ]
    assert table["b"].split()[-1] == "bit-equal"
    assert table["u"].endswith("not judged")
    assert lines[5] == "mine: v: off by 31 times"
    assert lines[6] == "not judged: mine: u: zero would pass too"
    assert lines[7].startswith("oracle pinned")
    assert lines[8] == "note: mind the gap"
    scalar = dataclasses.replace(SAME, shape=())
    assert "scalar" in str(Report((scalar,)))


# --- in any width ---

PATHS = [f"model/layers_{i}/attention/query/kernel" for i in range(11)]
LONG = tuple(
    dataclasses.replace(
        (EQUAL, WRONG, HIDDEN)[i % 3],
        candidate=f"a trainer of mine, in {i % 2 + 1} parts",
        path=path,
        ratio=float(i),
    )
    for i, path in enumerate(PATHS)
)


@pytest.mark.parametrize("width", [66, 80, 110, 140, 200])
def test_a_table_fits_its_width_and_no_two_rows_read_alike(width):
    """Columns go and paths lose their beginnings; numbers and verdicts stay whole."""
    report = Report(LONG, PINNED, ("a note " * 40,))
    lines = report.text(width).splitlines()
    head, rows = lines[0], lines[1:12]
    assert all(len(line) <= width for line in lines[:12])
    assert len({row.split("  ")[1] for row in rows}) == 11
    shown = re.split(" {2,}", head)
    assert {"candidate", "leaf", "error/bound", "verdict"} <= set(shown)
    start = head.index("error/bound") + len("error/bound")
    for row in rows:
        leaf = next(x for x in LONG if row[:start].endswith(f" {x.ratio:.3g}"))
        own = re.split(" {2,}", row)
        assert len(own) == len(shown)
        assert own[-1] == leaf.verdict
        assert leaf.candidate.endswith(own[0].removeprefix("…"))
        assert leaf.path.endswith(own[1].removeprefix("…"))
    assert (shown == [*COLUMNS]) == (width >= 140)
    if width == 200:
        assert all(path in report.text(width) for path in PATHS)
        assert "…" not in report.text(width)


def test_columns_go_in_an_order():
    """What is left says more than what went."""
    heads = [Report(LONG).text(width).splitlines()[0] for width in range(56, 140)]
    kept = [len(re.split(" {2,}", head)) for head in heads]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (4, 10)
    for head in heads:
        names = re.split(" {2,}", head)
        gone = [name for name in DROPPED if name not in names]
        assert gone == list(DROPPED[: len(gone)])


def test_what_is_wrong_comes_first_and_the_worst_of_it():
    """In the table, in the sentences below it, and in the error."""
    report = Report(LONG)
    rows = [line for line in report.text(200).splitlines() if "float32" in line]
    verdicts = [re.split(" {2,}", row)[-1] for row in rows]
    assert verdicts == ["FAILS"] * 4 + ["not judged"] * 3 + ["equal"] * 4
    places = [int(re.search(r"layers_(\d+)/", row)[1]) for row in rows]
    assert places == [10, 7, 4, 1, 8, 5, 2, 9, 6, 3, 0]
    with pytest.raises(VerificationError, match="gradients differ") as caught:
        report.raise_if_failed()
    for text in (str(caught.value), report.text(200).partition("equal\n")[2]):
        found = list(map(int, re.findall(r"layers_(\d+)/", text)))[-7:]
        assert found == [10, 7, 4, 1, 8, 5, 2]
    missing = dataclasses.replace(WRONG, path="lost", ratio=math.nan)
    first = Report((*LONG, missing)).text(200).splitlines()[1]
    assert " lost " in first


def test_the_width_is_the_terminals(monkeypatch):
    """Without one it is always the same; sentences have a line each in both."""
    long = dataclasses.replace(WRONG, problem="off by 31 times the bound, " * 9)
    report = Report((*LONG, long))
    monkeypatch.setenv("COLUMNS", "66")
    assert str(report) == report.text() == report.text(66)
    monkeypatch.setenv("COLUMNS", "150")
    assert str(report) == report.text(150)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    assert str(report) == report.text(110)
    assert f"mine: v: {long.problem}".rstrip() in str(report).splitlines()
    # A console breaks them at its own width.
    console = Console(file=io.StringIO(), width=66)
    console.print(report)
    shown = console.file.getvalue().splitlines()
    assert max(map(len, shown)) <= 66
    assert shown[:14] == [f"{x:66}"[: len(y)] for x, y in zip(
        report.text(66).splitlines()[:14], shown[:14], strict=True
    )]  # fmt: skip


def test_a_notebook_shows_what_is_printed(monkeypatch):
    """There rich shows what it renders itself, and returns nothing."""
    report = Report((EQUAL, WRONG), PINNED)
    expected = str(report)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(report) == expected
    assert "off by 31 times" in expected
    assert "planted" in str(Score("nothing was planted", ()))


def test_a_report_in_a_line():
    """As a failed assertion shows it: the counts, and the worst that is wrong."""
    assert repr(Report((EQUAL, SAME))) == (
        "<Report: ok, of 2 leaves 0 wrong and 0 not judged>"
    )
    worse = dataclasses.replace(WRONG, path="z", ratio=99.0, problem="off by 99 times")
    assert repr(Report((EQUAL, WRONG, HIDDEN, worse))) == (
        "<Report: not ok, of 4 leaves 2 wrong and 1 not judged; mine: z: off by 99 "
        "times>"
    )
    assert "mine: u: zero would pass" in repr(Report((HIDDEN,)))


def test_a_bound_far_above_every_error_is_a_note():
    """Not where bits are equal, and not where anything comes near it."""
    tight = dataclasses.replace(EQUAL, ratio=SUSPICIOUSLY_LOOSE * 2)
    loose = dataclasses.replace(EQUAL, ratio=SUSPICIOUSLY_LOOSE / 2)
    assert "suspiciously loose" in " ".join(looseness((loose, loose)))
    assert looseness((loose, tight)) == ()
    assert looseness((SAME,)) == ()
    assert looseness(()) == ()
