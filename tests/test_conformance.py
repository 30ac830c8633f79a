"""docs/conformance.md tells the truth: each test it names exists and is not skipped."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "conformance.md"
LEFT_OUT = "## What is left out"
# In a process of its own, as the collection of this session is already done.
COLLECT = """
import inspect, json, sys
import pytest

class PeerRecord:
    def pytest_collection_finish(self, session):
        found = {item.nodeid: marks(item) for item in session.items}
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)

def marks(item):
    given = [mark.name for mark in item.iter_markers()]
    return given + [name for name in ("skip", "xfail", "importorskip")
                    if f"pytest.{name}(" in inspect.getsource(item.function)]

arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]
sys.exit(pytest.main(arguments, plugins=[PeerRecord()]))
"""


def rows(text):
    """Cells of the rows of all tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "torch" and set(row[0]) != {"-"}]


def named(cell):
    return re.findall(r"`(tests/[^`]+)`", cell)


TABLE = rows(PAGE.read_text().partition(LEFT_OUT)[0])


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Marks of all tests in the files that the page names, by id."""
    ids = [one for row in TABLE for one in named(row[-1])]
    files = sorted({one.partition("::")[0] for one in ids})
    listing = tmp_path_factory.mktemp("conformance") / "collected.json"
    # All of them, also where this process runs a part of the slow tests.
    everything = {k: x for k, x in os.environ.items() if k != "JDIST_SLOW_PART"}
    ran = subprocess.run(
        [sys.executable, "-c", COLLECT, listing, *files],
        cwd=ROOT,
        env=everything,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(listing.read_text())


def matching(one, collected):
    """The tests of an id; without a parameter it means all of them."""
    return [name for name in collected if name == one or name.startswith(f"{one}[")]


def test_every_test_named_is_collected_and_not_skipped(collected):
    ids = [one for row in TABLE for one in named(row[-1])]
    assert len(ids) > 50
    assert [one for one in ids if not matching(one, collected)] == []
    forbidden = {"skip", "skipif", "xfail", "importorskip"}
    meant = {name for one in ids for name in matching(one, collected)}
    assert [name for name in meant if forbidden & set(collected[name])] == []


def test_every_row_names_scenarios_and_tests():
    assert len(TABLE) > 40
    for row in TABLE:
        assert len(row) == 3, row
        # Names of torch's tests, or words where it has none.
        assert re.fullmatch(r"(`test_\w+` ?)+|[^`]+", row[0]), row[0]
        assert row[1], row
        assert re.fullmatch(r"(`tests/[\w/]+\.py::[^`]+`(<br>)?)+", row[2]), row[2]


def test_no_scenario_comes_twice():
    text = PAGE.read_text()
    scenarios = [name for row in rows(text) for name in row[0].split()]
    torch_tests = [name for name in scenarios if name.startswith("`test_")]
    assert len(set(torch_tests)) == len(torch_tests)


def test_the_check_can_fail():
    """An id that is a prefix of another, or lacks its file, matches nothing."""
    marks = {"tests/a.py::test_one[x]": [], "tests/a.py::test_onerous": []}
    assert matching("tests/a.py::test_one", marks) == ["tests/a.py::test_one[x]"]
    assert matching("tests/a.py::test_o", marks) == []
    assert matching("tests/b.py::test_one", marks) == []
