"""Schedules to CSV and back; files that are refused, by row and column."""

import pytest

from jdist import pipeline
from jdist.pipeline.schedule.actions import ScheduleError
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from tests.pipeline.epochs import forward_only


@pytest.mark.parametrize(
    "schedule",
    [
        forward_only(2, 3),
        pipeline.gpipe(3, 2),
        pipeline.interleaved(2, 4, 2),
        pipeline.looped_bfs(2, 3, 2),
        pipeline.zero_bubble(3, 5),
        pipeline.zbv(3, 6),
        pipeline.dualpipe_v(2, 5),
    ],
    ids=lambda schedule: schedule.name,
)
def test_there_and_back(schedule, tmp_path):
    """By text and by file, clocks and split backward passes included."""
    text = schedule.to_csv(tmp_path / "schedule.csv")
    assert Schedule.from_csv(text) == schedule
    assert Schedule.from_csv(tmp_path / "schedule.csv", name="mine").name == "mine"
    assert Schedule.from_csv(tmp_path / "schedule.csv") == schedule


def test_replicas_and_updates_come_from_the_caller():
    schedule = pipeline.pipedream(2, 5, replicas=(2, 1), update_every=2)
    text = schedule.to_csv()
    back = Schedule.from_csv(
        text, placement=schedule.placement, update_policy=UpdatePolicy(every=2)
    )
    assert back == schedule


def test_the_text_has_a_row_for_each_worker_and_a_column_for_each_clock(tmp_path):
    """No more; lines end alike on every platform, and an idle worker has commas."""
    schedule = Schedule.of([["0F0", "0B0", "0W0"], [], ["1F0", "1B0"]])
    text = schedule.to_csv(tmp_path / "schedule.csv")
    assert text == "0F0,,,0I0,0W0\n,,,,\n,1F0,1B0,,\n"
    assert (tmp_path / "schedule.csv").read_bytes() == text.encode()
    again = Schedule.from_csv(text)
    assert again == schedule
    assert again.actions(1) == []


def test_only_the_order_counts():
    """Blank cells, and one with a message, take no clock."""
    found = Schedule.from_csv("0F0,,0SEND_F0,,,0B0\n,1F0,1B0\n")
    assert found.clock.tolist() == [0, 3, 1, 2]
    assert Schedule.from_csv("0F0,,,,,0B0\n,1F0,1B0\n").clock.tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("text", ["\n\n", ",\n,,\n"])
def test_a_text_without_an_action(text):
    with pytest.raises(ValueError, match=r"programs=...\).*at least one action"):
        Schedule.from_csv(text)


def test_blanks_around_cells_do_not_matter():
    assert Schedule.from_csv("0F0, 0B0 \n").clocks == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F0,,0B0\n,1F0 1B0,\n", r"row 1, column 1.*1F0 1B0"),
        ("0F0,0SEND_F,\n", r"row 0, column 1.*or 2SEND_F7\. Got 0SEND_F\."),
        ("0F0,0REDUCE_GRAD1,\n", r"row 0, column 1.*0REDUCE_GRAD1"),
        ("0F0,()OVERLAP_F_B,\n", r"row 0, column 1.*\(\)OVERLAP_F_B"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B,\n", r"row 0, column 1"),
        ("0F0,(0F1;0B0),\n", r"row 0, column 1"),
        ("0F0,0B0\n\n1F0,1B0\n", r"row 1.*must not be blank.*idle worker"),
        ("0F0," + 150_000 * "x", r"line 1.*must be CSV.*field limit"),
    ],
)
def test_cells_that_are_no_actions(text, match):
    with pytest.raises(ValueError, match=match):
        Schedule.from_csv(text)


def test_halves_must_be_written_as_halves():
    with pytest.raises(ScheduleError, match=r"0B0.*written as I without a W"):
        Schedule.from_csv("0F0,0I0\n")
    with pytest.raises(ScheduleError, match=r"0B0.*whole B beside a W"):
        Schedule.from_csv("0F0,0B0,0W0\n")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F0,0F1,0B1\n1F0,1F1,1B1,1B0\n", r"complete.*0B0.*missing"),
        ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n,,,,2F0,2B0,2F1\n", r"complete.*2B1"),
        ("0B0,0F0\n1F0,1B0\n", r"dependencies.*0B0.*in a circle"),
        ("0F1,0B0,0F3,0B1\n", r"complete.*0F0.*missing"),
    ],
)
def test_what_is_read_is_validated(text, match):
    with pytest.raises(ScheduleError, match=match):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F0,0F99999999,0B0", r"0F1.*missing of 1 stages and 100000000.*0F99999999"),
        ("0F0,99999999F0,0B0", r"1F0.*missing of 100000000 stages.*99999999F0"),
        ("0F0,0B0,0W2000000000", r"0F1.*missing.*0W2000000000"),
        ("0F0,0B3000000000", "3000000000 is beyond what 32 bits hold"),
        ("0F0,0B" + 5000 * "9", r"0B9{38}\.\.\. is beyond what 32 bits hold"),
    ],
)
def test_numbers_beyond_reason(text, match):
    """Refused before any table of so many stages and micro-batches is made."""
    with pytest.raises(ScheduleError, match=match):
        Schedule.from_csv(text)


def test_the_order_alone_where_columns_are_no_clocks():
    """torch's interleaved zero bubble of 3 workers with fewer micro-batches, 2."""
    text = (
        "0F0,0F1,,3F0,3F1,,,3I0,3W0,3I1,3W1,0I0,0W0,0I1,0W1\r\n"
        ",1F0,1F1,,4F0,,4F1,4I0,4I1,4W0,1I0,4W1,1I1,1W0,1W1\r\n"
        ",,2F0,2F1,,5F0,5I0,5F1,5I1,2I0,5W0,2I1,5W1,2W0,2W1\r\n"
    )
    order = [row.replace("I", "B").split(",") for row in text.split()]
    expected = Schedule.of([[cell for cell in row if cell] for row in order])
    assert Schedule.from_csv(text) == expected
    assert expected.clocks == 16  # one more than its columns


def test_dumps_of_torch_with_collectives():
    """GPipe and 1F1B as torch 2.13 orders them, its last stage of 1F1B included."""
    text = "0F0,0F1,0B0,0B1,0REDUCE_GRAD\r\n1F0,1F1,1B0,1B1,1REDUCE_GRAD\r\n"
    assert Schedule.from_csv(text) == pipeline.gpipe(2, 2)
    text = (
        "0F0,0F1,0B0,0F2,0B1,0B2,0REDUCE_GRAD\r\n"
        "1F1,1B0,1F2,1B1,1F3,1B2,1REDUCE_GRAD\r\n"
    )
    assert Schedule.from_csv(text) == pipeline.one_f_one_b(2, 3)


def test_a_dump_of_torch_with_messages():
    """Only the order of the actions is taken from it: interleaved, 2 workers, m = 2."""
    text = (
        "0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,"
        "2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,2REDUCE_GRAD,"
        "2RESHARD,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\r\n"
        "1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,"
        "3RECV_F1,3B0,3SEND_B0,1RECV_B0,3F1,3B1,3SEND_B1,1RECV_B1,3REDUCE_GRAD,"
        "3RESHARD,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\r\n"
    )
    assert Schedule.from_csv(text) == pipeline.interleaved(2, 2, 2)


def test_overlapped_pairs_are_consecutive_actions():
    """torch's DualPipeV of 2 workers and 5 micro-batches."""
    text = (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,"
        "(0F4;3B2)OVERLAP_F_B,(3F3;0B1)OVERLAP_F_B,3B3,(3F4;0B2)OVERLAP_F_B,3B4,0I3,"
        "0W3,0I4,0W4\r\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,"
        "(2F3;1B1)OVERLAP_F_B,(1F4;2B2)OVERLAP_F_B,(2F4;1B2)OVERLAP_F_B,2B3,1B3,2I4,"
        "1I4,2W4,1W4\r\n"
    )
    assert Schedule.from_csv(text) == pipeline.dualpipe_v(2, 5)


def test_a_file_of_a_spreadsheet(tmp_path):
    """With a byte order mark, carriage returns and blank lines at the end."""
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,,0B0\r\n,1F0,1B0\r\n\r\n\r\n")
    assert Schedule.from_csv(path).workers == 2


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        Schedule.from_csv(tmp_path / "nothing")
