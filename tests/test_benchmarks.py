"""Goals of benchmarks: judged, compared with the last run, and kept in one table."""

import importlib
import json
import pkgutil
import sys
import types
from types import SimpleNamespace

import pytest

import benchmarks
from benchmarks import __main__ as benchmarks_main
from benchmarks import _autograd_timeline, _goals, _record
from benchmarks._goals import Figure, Goal
from benchmarks._harness import Case, table, timing
from benchmarks._record import Run
from experiments import _runner


def goal(low, median, high, limit=1.0, **options):
    return Goal("of the other's time", Figure(median, low, high), limit, **options)


def run(*goals, job="small", date="2026-11-23"):
    return Run(date, "2 cores", [Case(job, {}, goals=list(goals))])


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (goal(0.9, 1.0, 1.2), True),
        (goal(0.9, 1.1, 1.2), False),
        (goal(0.9, 1.0, 1.2, at_least=True), True),
        (goal(0.8, 0.9, 1.2, at_least=True), False),
    ],
)
def test_a_goal_is_met_at_its_limit(found, met):
    assert found.met == met
    assert ("missed" in str(found)) != met


@pytest.mark.parametrize(
    ("now", "at_least", "is_worse"),
    [
        ((1.21, 1.3, 1.4), False, True),
        ((1.19, 1.3, 1.4), False, False),
        ((0.5, 0.6, 0.79), False, False),
        ((0.5, 0.6, 0.79), True, True),
        ((0.5, 0.6, 0.81), True, False),
    ],
)
def test_what_got_worse_by_more_than_the_spread_is_said(now, at_least, is_worse):
    earlier = run(goal(0.8, 1.0, 1.2, at_least=at_least), date="2026-11-22")
    found = _record.worse(earlier, run(goal(*now, at_least=at_least)))
    assert len(found) == is_worse
    if is_worse:
        assert found[0].startswith(f"small: {now[1]:.3g} [")
        assert found[0].endswith("it was 1 [0.8, 1.2] on 2026-11-22")


def test_a_job_that_was_not_recorded_is_no_worse():
    earlier = run(goal(0.8, 1.0, 1.2), job="large")
    assert _record.worse(earlier, run(goal(2.0, 2.1, 2.2))) == []


def test_ratios_have_the_spread_of_both():
    one, other = timing([2.0, 2.0, 3.0, 4.0]), timing([1.0, 1.0, 1.0, 2.0])
    found = _goals.ratio(one, other)
    assert found == Figure(
        one.median / other.median, one.low / other.high, one.high / other.low
    )
    assert found.low < found.median < found.high
    assert _goals.scaled(one, 10.0) == Figure(
        10 * one.median, 10 * one.low, 10 * one.high
    )


def timed(*values, job="small", date="2026-11-23", where="2 cores"):
    return Run(date, where, [Case(job, {"jdist": timing(list(values))})])


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        (timed(3.0, 4.0, 5.0), 1),
        (timed(1.5, 2.5, 3.5), 0),
        (timed(3.0, 4.0, 5.0, where="64 cores"), 0),
        (timed(3.0, 4.0, 5.0, job="large"), 0),
    ],
)
def test_a_time_without_a_goal_is_compared_on_the_same_machine(now, lines):
    found = _record.worse(timed(1.0, 2.0, 2.9), now)
    assert len(found) == lines
    if lines:
        assert found == ["small: jdist takes 4.00 s; it was 2.00 s on 2026-11-23"]


def test_runs_are_kept_beside_those_of_other_benchmarks(tmp_path):
    """Each in place of the earlier one of its name, in the file and on the page."""
    path, page = tmp_path / "recorded.json", tmp_path / "page.md"
    path.write_text("{}")
    empty = [
        f"<!-- {name}: `make bench` writes this -->\nold\n<!-- end of {name} -->\n"
        for name in ("goals", "b", "c", "d")
    ]
    page.write_text("\n".join(["before", *empty, "after\n"]))
    pages = [page]
    _record.record({"b": run(goal(0.8, 0.9, 1.2))}, path, pages)
    _record.record({"a": run(goal(1.8, 1.9, 2.2, unit=" us"))}, path, pages)
    times = {"jdist": timing([1.0, 2.0, 3.0]), "torch": timing([3.0, 4.0, 5.0])}
    found = [goal(0.7, 0.75, 0.8)]
    case = Case("small", times, limit=0.5, note="idle", goals=found)
    last = Run("2026-11-24", "2 cores", [case], seconds=3.0)
    _record.record({"b": last}, path, pages)
    rows = {"Seconds": [["x", "y"], ["1", "2"]]}
    _record.record({"c": Run("2026-11-24", "64 cores", tables=rows)}, path, pages)
    kept = _record.recorded(path)
    assert list(kept) == ["a", "b", "c"]
    assert kept["b"] == last
    assert (
        page.read_text()
        == """before
<!-- goals: `make bench` writes this -->

| `python -m benchmarks` | job | goal | figure |  | date, machine |
|---|---|---|---|---|---|
| `a` | small | at most 1 us of the other's time | 1.9 [1.8, 2.2] us | **missed** | \
2026-11-23, 1 |
| `b` | small | at most 1 of the other's time | 0.75 [0.7, 0.8] | met | 2026-11-24, 1 |

1. 2 cores
2. 64 cores

<!-- end of goals -->

<!-- b: `make bench` writes this -->

Date, machine: 2026-11-24, 1; the run took 3 s.

| job | contender | median | middle half | to the first |
|---|---|---|---|---|
| small | jdist | 2.00 s | 1.00 s to 3.00 s | 1.00 |
|  | torch | 4.00 s | 3.00 s to 5.00 s | 2.00 |
|  | physical limit | 500.00 ms |  | 0.25 |

- small: idle

<!-- end of b -->

<!-- c: `make bench` writes this -->

Date, machine: 2026-11-24, 2.

Seconds:

| x | y |
|---|---|
| 1 | 2 |

<!-- end of c -->

<!-- d: `make bench` writes this -->

No run is recorded.

<!-- end of d -->

after
"""
    )


def test_what_fails_keeps_no_figures_and_stops_no_other_benchmark(
    monkeypatch, tmp_path, capsys
):
    """An experiment fails if it does not hold; its records lie in their own folder."""
    kept, folders = {}, []
    case = Case("small", {"jdist": timing([1.0, 2.0, 3.0])})

    def experiment(name, settings, folder, console):
        folders.append(folder)
        folder.mkdir()
        tables = {"Seconds": [["x"], ["1"]]}
        (folder / f"{name}.json").write_text(json.dumps({"tables": tables}))
        return name == "rpc_cost"

    def load(name):
        if name == "benchmarks.b":
            raise ValueError("no socket is left")
        return SimpleNamespace(__doc__="How fast?", measure=lambda: [case])

    monkeypatch.setattr(_runner, "run", experiment)
    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(_record, "recorded", dict)
    monkeypatch.setattr(_record, "record", kept.update)
    names = ["a", "b", "rpc_cost", "c"]
    assert benchmarks_main.run(names, tmp_path, record=True) == ["b"]
    assert "no socket is left" in capsys.readouterr().out
    assert list(kept) == ["a", "rpc_cost", "c"]
    assert kept["a"].cases == [case]
    assert kept["rpc_cost"].tables == {"Seconds": [["x"], ["1"]]}
    assert folders == [tmp_path / "experiments"]
    folders[0].joinpath("rpc_cost.json").unlink()
    folders[0].rmdir()
    assert benchmarks_main.run(["ddp_buckets"], tmp_path, record=True) == [
        "ddp_buckets"
    ]
    assert "does not hold" in capsys.readouterr().out
    assert "ddp_buckets" not in kept


@pytest.mark.parametrize("page", [_record.PAGE, _record.APPENDIX])
def test_a_page_has_what_was_recorded(page):
    """Its tables are not edited by hand: every line of one stands in a block."""
    text = page.read_text()
    assert text == _record.written(text, _record.recorded())
    rest = _record._BLOCK.sub("", text)
    assert not [line for line in rest.splitlines() if line.startswith("|")]


def test_each_benchmark_has_a_table():
    """In the appendix; the page for users has the summary alone."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    names = {module.name for module in modules if not module.name.startswith("_")}
    found = _record.blocks(_record.APPENDIX.read_text())
    assert sorted(found) == sorted({_record.GOALS, *names, *_record.EXPERIMENTS})
    assert _record.blocks(_record.PAGE.read_text()) == [_record.SUMMARY]


def test_the_summary_has_a_ratio_of_each_row():
    """With both times, and the spread of their ratio."""
    kept = _record.recorded()
    *_, row = _record.BESIDE
    (times,) = (c.timings for c in kept[row.benchmark].cases if c.name == row.case)
    one = _goals.ratio(times[row.ours], times[row.theirs])
    lines = _record.written(_record.PAGE.read_text(), kept).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == len(_record.BESIDE) + 2
    assert table[-1].endswith(f"| {_goals.shown(one)} |")


def test_goals_stand_under_the_table_of_a_benchmark():
    found = goal(0.8, 1.5, 1.6)
    case = Case("small", {"jdist": timing([1.0, 2.0, 3.0])}, goals=[found])
    assert table("name", [case]).caption == f"small: {found}"


def test_a_lane_is_cut_where_stations_begin_and_end():
    """The innermost counts, and a wait is over when the message has been sent."""
    line = _autograd_timeline
    rows = [
        (1.0, 2.0, line.CODEC), (2.5, 3.0, line.WIRE), (2.5, 6.0, line.WAITING),
        (3.5, 3.5, line.XLA),
    ]  # fmt: skip
    found = line._bars(rows, [0.5, 5.0], 0.0, 7.0)
    assert [(bar.begin, bar.end, bar.station) for bar in found] == [
        (0.0, 1.0, line.PYTHON), (1.0, 2.0, line.CODEC), (2.0, 2.5, line.PYTHON),
        (2.5, 3.0, line.WIRE), (3.0, 5.0, line.WAITING), (5.0, 6.0, line.WIRE),
        (6.0, 7.0, line.PYTHON),
    ]  # fmt: skip
    assert line._shares([found, found[:2]], line.PYTHON) == "2500000 + 1000000 us"


def test_a_recorded_benchmark_draws_its_pictures(monkeypatch, tmp_path):
    drawn = []
    for name, kept in (("drawing", {"draw": drawn.append}), ("plain", {})):
        module = types.SimpleNamespace(**kept)
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
        _record.draw(name, tmp_path)
    _record.draw(_record.EXPERIMENTS[0], tmp_path)
    assert drawn == [tmp_path]
    assert (_record.PICTURES / "example_iv.png").exists()
    assert "_static/example_iv.png" in _record.APPENDIX.read_text()
