"""The walks of docs/architecture.md lead where they say, and pass few files."""

import re
from pathlib import Path

import pytest

from tests import walks

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
STATION = re.compile(r"^\d+\. `(\S+\.py)`, `([\w.]+)`", re.MULTILINE)


def told(title):
    """The stations that a walk of the document lists: files and functions."""
    section = PAGE.read_text().partition(f"### {title}\n")[2]
    return STATION.findall(section.partition("\n##")[0])


def missed(stations, passed):
    """The first station that is not passed after those before it; None if all are."""
    rest = iter(passed)
    for station in stations:
        if station not in rest:
            return station
    return None


@pytest.mark.parametrize(
    ("title", "walk"),
    [
        ("An `rpc_sync`", "rpc_sync"),
        ("A gradient of distributed autograd", "gradient"),
    ],
)
def test_a_walk_between_two_processes(title, walk, tmp_path):
    """Every station is passed, in this order, on one side or the other."""
    stations = told(title)
    assert len(stations) >= 10
    passed = walks.of_workers(walk, tmp_path)
    assert missed(stations, passed) is None


def test_the_walk_of_a_micro_batch():
    """In one process; the second stage follows the first."""
    stations = told("A micro-batch of a pipeline")
    assert len(stations) >= 10
    assert missed(stations, walks.of_a_micro_batch()) is None


def test_a_wrong_turn_is_seen():
    """A station that is not passed, and one that is passed too early."""
    passed = [("a.py", "f"), ("b.py", "g"), ("a.py", "f")]
    assert missed([("a.py", "f"), ("b.py", "g"), ("a.py", "f")], passed) is None
    assert missed([("b.py", "g"), ("b.py", "g")], passed) == ("b.py", "g")
    assert missed([("a.py", "f"), ("c.py", "h")], passed) == ("c.py", "h")
