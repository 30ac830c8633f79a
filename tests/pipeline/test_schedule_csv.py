"""Schedules to CSV and back; files that are refused, by row and column."""

import pytest

from jdist.pipeline import schedules
from jdist.pipeline.schedule import Updates
from jdist.pipeline.schedule_actions import ScheduleError
from jdist.pipeline.schedule_csv import from_csv, to_csv


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.forward_only(2, 3),
        schedules.gpipe(3, 2),
        schedules.interleaved(2, 4, 2),
        schedules.looped_bfs(2, 3, 2),
        schedules.zero_bubble(3, 5),
        schedules.zbv(3, 6),
        schedules.dualpipe_v(2, 5),
    ],
    ids=lambda schedule: schedule.name,
)
def test_there_and_back(schedule, tmp_path):
    """By text and by file, clocks and split backward passes included."""
    text = to_csv(schedule, tmp_path / "schedule.csv")
    assert from_csv(text) == schedule
    assert from_csv(tmp_path / "schedule.csv", name="mine").name == "mine"
    assert from_csv(tmp_path / "schedule.csv") == schedule


def test_replicas_and_updates_come_from_the_caller():
    schedule = schedules.pipedream(2, 5, replicas=(2, 1), update_every=2)
    text = to_csv(schedule)
    back = from_csv(text, placement=schedule.placement, updates=Updates(2))
    assert back == schedule


def test_idle_clocks_are_kept():
    """A schedule that waits longer than it must."""
    schedule = from_csv("0F0,,,,0B0\n,,1F0,1B0,\n")
    assert schedule.clocks == 5
    assert schedule.clock.tolist() == [0, 4, 2, 3]


def test_blanks_around_cells_do_not_matter():
    assert from_csv("0F0, 0B0 \n").clocks == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F0,,0B0\n,1F0 1B0,\n", r"row 1, column 1.*1F0 1B0"),
        ("0F0,0SEND_F0,\n", r"row 0, column 1.*0SEND_F0.*leave them out"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,\n", r"row 0, column 1"),
    ],
)
def test_cells_that_are_no_actions(text, match):
    with pytest.raises(ValueError, match=match):
        from_csv(text)


def test_halves_must_be_written_as_halves():
    with pytest.raises(ScheduleError, match=r"0B0.*written as I without a W"):
        from_csv("0F0,0I0\n")
    with pytest.raises(ScheduleError, match=r"0B0.*whole B beside a W"):
        from_csv("0F0,0B0,0W0\n")


def test_what_is_read_is_validated():
    with pytest.raises(ScheduleError, match=r"dependencies.*0B0"):
        from_csv("0F0,,0B0\n,1F0,1B0\n")


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        from_csv(tmp_path / "nothing")
