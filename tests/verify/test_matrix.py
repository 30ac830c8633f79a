"""The matrix: what is judged together, what is shown of it, what is written."""

import functools
import itertools
import json
import os
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jdist import Unavailable
from jdist.verify import LeafReport, Report, matrix
from jdist.verify.matrix import Cell
from jdist.verify.oracle import REDUCERS

LEAF = LeafReport("mine", "w", "float32", (2,), 1e-8, 1e-7, 2.0, 0.125, 1.0)
SAME = LeafReport("mine", "w", "float32", (2,), 0.0, 0.0, 0.0, 0.0, 1.0)
BAD = LeafReport("mine", "w", "float32", (2,), 1.0, 1.0, 9e6, 3e5, 0.1, "off by 3e5")


def cell(strategy, reduction, dtype, *leaves, skipped=""):
    """A cell, judged if there are leaves."""
    report = Report(leaves) if leaves else None
    return Cell(strategy, reduction, dtype, report, skipped)


def test_a_cell_holds_unless_something_is_wrong():
    """What was skipped is not wrong; what was judged must be ok."""
    assert cell("a", "mean", "float32", LEAF).ok
    assert cell("a", "mean", "float32", skipped="needs 512 devices").ok
    assert not cell("a", "mean", "float32", LEAF, BAD).ok


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (cell("a", "mean", "float32", LEAF), "0.12"),
        (cell("a", "mean", "float32", SAME, SAME), "bit-equal"),
        (cell("a", "mean", "float32", LEAF, BAD), "FAILS 3e+05"),
        (cell("a", "mean", "float32", skipped="no device"), "skipped"),
    ],
)
def test_what_a_cell_shows(shown, text):
    """The largest error/bound, or why there is none."""
    assert str(shown.__rich__()) == text


def test_a_line_has_a_strategys_reductions_in_one_dtype():
    """Below their names, and within 80 columns whatever stands there."""
    wide = LeafReport("m", "w", "float32", (2,), 1.0, 1.0, 9.0, 1.2e-300, 1.0, "off")
    cells = [
        cell("first", "mean", "bfloat16", LEAF),
        cell("first", "sum", "bfloat16", SAME),
        cell("first", "max", "bfloat16", wide),
        cell("first", "min", "bfloat16", skipped="needs 512 devices"),
    ]
    names = str(matrix.heading(tuple(REDUCERS)))
    shown = str(matrix.line(cells))
    assert names.split() == ["mean", "sum", "max", "min"]
    assert shown.split() == [
        "bfloat16", "0.12", "bit-equal", "FAILS", "1.2e-300", "skipped",
    ]  # fmt: skip
    assert len(names) == len(shown) <= 80
    for name, text in zip(REDUCERS, ("0.12", "equal", "1.2e-300", "pped"), strict=True):
        assert names.index(name) + len(name) == shown.index(text) + len(text)


def test_what_is_written():
    """A record for each cell, with the whole report, or why there is none."""
    cells = [
        cell("first", "mean", "float32", LEAF, BAD),
        cell("second", "mean", "float32", skipped="needs 512 devices"),
    ]
    first, second = json.loads(matrix.to_json(cells))
    assert (first["strategy"], first["reduction"], first["dtype"]) == (
        "first", "mean", "float32",
    )  # fmt: skip
    assert [leaf["ratio"] for leaf in first["report"]["leaves"]] == [0.125, 3e5]
    assert first["skipped"] == ""
    assert second["report"] is None
    assert second["skipped"] == "needs 512 devices"


def weighted(loss_fn, reduction):
    """A strategy that is right for sums and means."""
    divide = {"mean": jnp.sum, "sum": lambda w: jnp.ones((), w.dtype)}[reduction]

    def candidate(params, batch, weights):
        w = jnp.asarray(weights, batch["x"].dtype)
        return jax.value_and_grad(lambda p: jnp.sum(loss_fn(p, batch) * w) / divide(w))(
            params
        )

    return candidate


def test_a_reference_is_measured_once_and_each_strategy_judged_by_itself(monkeypatch):
    """With its own dtype and reduction, told to the strategy when it is built."""
    measured = []
    reference = matrix.Reference

    def counted_reference(call, loss, *problem):
        measured.append(loss.reduction)
        return reference(call, loss, *problem)

    monkeypatch.setattr(matrix, "Reference", counted_reference)
    asked = []

    def counted(loss_fn, reduction):
        asked.append(reduction)
        return weighted(loss_fn, reduction)

    def halved(loss_fn, reduction):
        right = weighted(loss_fn, reduction)

        def candidate(params, batch, weights):
            loss, gradient = right(params, batch, weights)
            return loss, jax.tree.map(lambda g: g / 2, gradient)

        return candidate

    def missing(loss_fn, reduction):
        raise Unavailable("needs 512 devices")

    rows = {"right": counted, "half": halved, "missing": missing}
    lines = matrix.judge(rows, ("sum",), ("float32", "float64"))
    first = next(lines)
    # Nothing of another strategy is needed to show the first.
    assert [cell.strategy for cell in first] == ["right"]
    assert asked == measured == ["sum"]
    cells = [cell for (cell,) in (first, *lines)]
    assert asked == measured == ["sum", "sum"]
    assert [c.strategy for c in cells] == [name for name in rows for _ in range(2)]
    for number, dtype in enumerate(("float32", "float64")):
        right, half, skipped = cells[number::2]
        assert (right.dtype, right.reduction) == (dtype, "sum")
        assert right.ok
        assert {leaf.dtype for leaf in right.report.leaves} == {dtype}
        assert {leaf.candidate for leaf in half.report.leaves} == {"half"}
        assert all("it is 0.5 times" in leaf.problem for leaf in half.report.failures)
        assert skipped.report is None
        assert skipped.skipped == "needs 512 devices"


def test_reductions_of_one_dtype_share_the_programs_of_their_measurements(monkeypatch):
    """What is measured is compiled once for each dtype, whatever it is reduced by."""
    given = []

    def reference(call, loss, *problem):
        given.append((loss.reduction, loss.programs))
        return SimpleNamespace(judge=lambda candidates, peers: None)

    monkeypatch.setattr(matrix, "Reference", reference)
    rows = {"one": weighted, "another": weighted}
    list(matrix.judge(rows, ("mean", "sum"), ("float32", "float64")))
    assert [reduction for reduction, _ in given] == ["mean", "sum"] * 2
    single, _, double, _ = programs = [each for _, each in given]
    assert programs == [single, single, double, double]
    assert single is not double


def test_no_thread_of_a_pool_is_left_when_all_are_judged(monkeypatch):
    """One that ends as the interpreter exits closes the pipe by which it is woken."""
    # Builtins, so that the processes need not import JAX to find them.
    monkeypatch.setattr(matrix, "_of_installed", itertools.product)
    before = threading.enumerate()
    devices = SimpleNamespace(set_up=int)
    found = matrix.judge_in_processes("abc", ("mean",), ("float32",), 2, devices)
    assert sorted({("mean", "float32", name) for *_, name in found}) == [
        ("mean", "float32", name) for name in "abc"
    ]
    assert set(threading.enumerate()) <= set(before)


def test_no_thread_of_a_pool_is_left_after_an_error(monkeypatch):
    """Nor where a row raises, or where what is judged is not looked at to its end."""
    before = threading.enumerate()
    given = ("mean",), ("float32",), 2, SimpleNamespace(set_up=int)
    monkeypatch.setattr(matrix, "_of_installed", range)
    with pytest.raises(TypeError, match="range expected"):
        list(matrix.judge_in_processes("abc", *given))
    assert set(threading.enumerate()) <= set(before)
    monkeypatch.setattr(matrix, "_of_installed", itertools.product)
    next(found := matrix.judge_in_processes("abc", *given))
    found.close()
    assert set(threading.enumerate()) <= set(before)


def test_a_process_that_is_killed_ends_the_judgement():
    dying = SimpleNamespace(set_up=functools.partial(os._exit, 9))
    names = ("pipeline 1F1B x3", "data_parallel all_reduce x2")
    lines = matrix.judge_in_processes(names, ("mean",), ("float32",), 2, dying)
    with pytest.raises(RuntimeError, match=r"One of 2 processes .* --processes 1"):
        list(lines)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rules_tell_a_strategy_that_corrects_its_scale_afterwards(dtype):
    """Right for a loss whose rules are linear in their cotangent."""

    def corrected(loss_fn, reduction):
        factor = {"mean": 8, "sum": 0.125}[reduction]
        scaled = weighted(lambda *given: factor * loss_fn(*given), reduction)
        return lambda *given: jax.tree.map(lambda x: x / factor, scaled(*given))

    rows = {"right": weighted, "corrected": corrected}
    for problem in matrix.PROBLEMS:
        lines = matrix.judge(rows, ("mean", "sum"), (dtype,), problem)
        right, other = [[cell.ok for cell in cells] for cells in lines]
        assert right == [True, True]
        assert other == [problem == "standard"] * 2


def test_the_strategies_of_all_packages_are_found_by_name(monkeypatch):
    """Each entry point gives a function that returns strategies."""

    class Entry:
        def __init__(self, *names):
            self.names = names

        def load(self):
            return lambda: dict.fromkeys(self.names, weighted)

    groups = []

    def entry_points(group):
        groups.append(group)
        return [Entry("one", "two"), Entry("three")]

    monkeypatch.setattr(matrix.metadata, "entry_points", entry_points)
    assert list(matrix.strategies()) == ["one", "two", "three"]
    assert groups == ["jdist.verify"]
