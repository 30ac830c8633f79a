"""The matrix: what is judged together, what is shown of it, what is written."""

import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jdist import Unavailable
from jdist.verify import LeafReport, Report, matrix
from jdist.verify.matrix import Cell

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


def test_the_table_has_rows_by_dtype_and_columns_by_reduction():
    """In the reductions' own order; a strategy's name stands once."""
    cells = [
        cell(name, reduction, dtype, LEAF if name == "first" else SAME)
        for dtype in ("float32", "bfloat16")
        for reduction in ("sum", "mean")
        for name in ("first", "second")
    ]
    table = matrix.table(cells)
    assert [column.header for column in table.columns] == [
        "strategy", "dtype", "mean", "sum",
    ]  # fmt: skip
    console = Console(width=120, record=True)
    with console.capture() as captured:
        console.print(table)
    rows = [line.split() for line in captured.get().splitlines() if "float" in line]
    names = [[word for word in row if word in ("first", "second")] for row in rows]
    assert names == [["first"], [], ["second"], []]
    assert [row.count("0.12") for row in rows] == [2, 2, 0, 0]
    assert [row.count("bit-equal") for row in rows] == [0, 0, 2, 2]


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


def test_a_column_is_judged_together_and_each_strategy_by_itself():
    """With its own dtype and reduction, told to the strategy when it is built."""
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
    columns = list(matrix.judge(rows, ("sum",), ("float32", "float64")))
    assert asked == ["sum", "sum"]
    assert [[c.strategy for c in column] for column in columns] == [list(rows)] * 2
    for column, dtype in zip(columns, ("float32", "float64"), strict=True):
        right, half, skipped = column
        assert (right.dtype, right.reduction) == (dtype, "sum")
        assert right.ok
        assert {leaf.dtype for leaf in right.report.leaves} == {dtype}
        assert {leaf.candidate for leaf in half.report.leaves} == {"half"}
        assert all("it is 0.5 times" in leaf.problem for leaf in half.report.failures)
        assert skipped.report is None
        assert skipped.skipped == "needs 512 devices"


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
