"""Goals of benchmarks: judged, compared with the last run, and kept in one table."""

import pytest

from benchmarks import _goals
from benchmarks._goals import Figure, Goal, Run
from benchmarks._harness import Case, table, timing


def goal(low, median, high, limit=1.0, **options):
    return Goal("of the other's time", Figure(median, low, high), limit, **options)


def run(*goals, job="small", date="2026-11-23"):
    return Run(date, "2 cores", {job: list(goals)})


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
    found = _goals.worse(earlier, run(goal(*now, at_least=at_least)))
    assert len(found) == is_worse
    if is_worse:
        assert found[0].startswith(f"small: {now[1]:.3g} [")
        assert found[0].endswith("it was 1 [0.8, 1.2] on 2026-11-22")


def test_a_job_that_was_not_recorded_is_no_worse():
    earlier = run(goal(0.8, 1.0, 1.2), job="large")
    assert _goals.worse(earlier, run(goal(2.0, 2.1, 2.2))) == []


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


def test_runs_are_kept_beside_those_of_other_benchmarks(tmp_path):
    """Each in place of the earlier one of its name, in the file and on the page."""
    path, page = tmp_path / "recorded.json", tmp_path / "page.md"
    path.write_text("{}")
    page.write_text(f"before\n{_goals.BEGIN}\nold\n{_goals.END}\nafter\n")
    _goals.record({"b": run(goal(0.8, 0.9, 1.2))}, path, page)
    _goals.record({"a": run(goal(1.8, 1.9, 2.2, unit=" us"))}, path, page)
    last = run(goal(0.7, 0.75, 0.8), date="2026-11-24")
    _goals.record({"b": last}, path, page)
    kept = _goals.recorded(path)
    assert list(kept) == ["a", "b"]
    assert kept["b"] == last
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    lines = text.splitlines()
    rows = lines[lines.index("|---|---|---|---|---|---|") + 1 :]
    assert rows[:3] == [
        "| `a` | small | at most 1 us of the other's time | 1.9 [1.8, 2.2] us "
        "| **missed** | 2026-11-23, 1 |",
        "| `b` | small | at most 1 of the other's time | 0.75 [0.7, 0.8] "
        "| met | 2026-11-24, 1 |",
        "",
    ]


def test_the_page_has_what_was_recorded():
    """Neither is edited by hand."""
    page = _goals.PAGE.read_text()
    assert page.partition(_goals.BEGIN)[2].partition(_goals.END)[0].strip() == (
        _goals.table(_goals.recorded()).strip()
    )


def test_goals_stand_under_the_table_of_a_benchmark():
    found = goal(0.8, 1.5, 1.6)
    case = Case("small", {"jdist": timing([1.0, 2.0, 3.0])}, goals=[found])
    assert table("name", [case]).caption == f"small: {found}"
