"""The house stands as docs/architecture.md draws it; each departure is seen."""

import re
from pathlib import Path

import pytest

from tests.architecture import ROOMS, violations

ROOT = Path(__file__).parents[1]

PLANTED = {
    "upward import": (
        "jdist/reduction.py",
        '"""R."""\nfrom jdist.data_parallel import x\n',
        "reduction imports data_parallel",
    ),
    "sideways import": (
        "jdist/verify/a.py",
        '"""V."""\nimport jdist.optim\n',
        "verify imports optim",
    ),
    "strategy imports the judge": (
        "jdist/data_parallel/a.py",
        '"""D."""\nfrom jdist import verify\n',
        "data_parallel imports verify",
    ),
    "ground imports upwards": (
        "jdist/_tree.py",
        '"""T."""\nfrom jdist.optim import sgd\n',
        "_tree imports optim",
    ),
    "private JAX import": (
        "jdist/segment.py",
        '"""S."""\nfrom jax._src import core\n',
        "private JAX name",
    ),
    "private JAX attribute": (
        "jdist/segment.py",
        '"""S."""\nimport jax\nx = jax._src.core\n',
        "private JAX name",
    ),
    "schedule with JAX": (
        "jdist/pipeline/schedule/schedule.py",
        '"""S."""\nimport jax\n',
        "a schedule file imports jax",
    ),
    "schedule with the simulator": (
        "jdist/pipeline/schedule/clock.py",
        '"""S."""\nfrom jdist.pipeline.simulation import Costs\n',
        "a schedule file imports jdist.pipeline.simulation",
    ),
    "schedule family with rpc": (
        "jdist/pipeline/schedules/gpipe.py",
        '"""S."""\nfrom jdist.rpc import spawn\n',
        "a schedule file imports jdist.rpc",
    ),
    "experiment with a private name": (
        "experiments/e.py",
        '"""E."""\nfrom jdist._tree import path_of\n',
        "an experiment imports a private name",
    ),
    "example with a private name": (
        "examples/e.py",
        '"""E."""\nfrom jdist import _tree\n',
        "an example imports what is not public",
    ),
    "example with a part's inside": (
        "examples/e.py",
        '"""E."""\nfrom jdist.rpc.base.future import Future\n',
        "an example imports what is not public",
    ),
    "relative import": ("jdist/optim/a.py", '"""O."""\nfrom . import b\n', "relative"),
    "no docstring": ("jdist/optim/a.py", "x = 1\n", "no module docstring"),
    "print": ("jdist/rpc/a.py", '"""R."""\nprint(1)\n', "printing"),
    "sleep": ("jdist/rpc/a.py", '"""R."""\nimport time\ntime.sleep(1)\n', "sleeping"),
    "bare except": (
        "jdist/rpc/a.py",
        '"""R."""\ntry:\n    x = 1\nexcept:\n    x = 2\n',
        "bare except",
    ),
    "long function": (
        "jdist/rpc/a.py",
        '"""R."""\ndef f():\n' + "    x = 1\n" * 60,
        "f is longer than 60",
    ),
    "face without names": (
        "jdist/optim/__init__.py",
        '"""O."""\n',
        "has no `__all__`",
    ),
    "inner face without names": (
        "jdist/segment/internal.py",
        '"""S."""\n',
        "has no `__all__`",
    ),
}

# Departures that two files make together; the first one is named.
PLANTED_TOGETHER = {
    "another part's inside": (
        {
            "jdist/pipeline/run/a.py": "from jdist.segment._residuals import Rest\n",
            "jdist/segment/_residuals.py": "class Rest:\n    pass\n",
        },
        "imports jdist/segment/_residuals.py, which is no face of segment",
    ),
    "another part's room": (
        {
            "jdist/pipeline/run/a.py": "from jdist.rpc.calls import agent\n",
            "jdist/rpc/calls/agent.py": "",
        },
        "imports jdist/rpc/calls/agent.py, which is no face of rpc",
    ),
    "upwards in a part": (
        {
            "jdist/segment/_residuals.py": "import jdist.segment._segment\n",
            "jdist/segment/_segment.py": "",
        },
        "_residuals imports _segment, which is not below it",
    ),
    "sideways in a part": (
        {
            "jdist/segment/_lookup/cache.py": (
                "from jdist.segment._programs import plan\n"
            ),
            "jdist/segment/_programs/plan.py": "",
        },
        "_lookup imports _programs, which is not below it",
    ),
    "a room of no drawing": (
        {
            "jdist/segment/_helpers.py": "import jdist.segment._residuals\n",
            "jdist/segment/_residuals.py": "",
        },
        "_helpers is no room that ROOMS draws in segment",
    ),
    "a circle": (
        {
            "jdist/optim/algorithms/a.py": "import jdist.optim.algorithms.b\n",
            "jdist/optim/algorithms/b.py": (
                "def f():\n    from jdist.optim.algorithms import a\n"
            ),
        },
        "a circle of imports: ",
    ),
    "a circle of types": (
        {
            "jdist/optim/algorithms/adam.py": (
                "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n"
                "    from jdist.optim.algorithms.sgd import SGDState\n"
            ),
            "jdist/optim/algorithms/sgd.py": "import jdist.optim.algorithms.adam\n",
        },
        "a circle of imports: ",
    ),
    "one name for two classes": (
        {
            "jdist/optim/labels.py": "class Plan:\n    pass\n",
            "jdist/segment/_residuals.py": "def f():\n    class Plan:\n        pass\n",
        },
        "class Plan is in jdist/optim/labels.py too",
    ),
    "a function that hides its module": (
        {
            "jdist/optim/algorithms/__init__.py": (
                "from jdist.optim.algorithms import sgd\n"
                "from jdist.optim.algorithms.adam import adam\n"
                '__all__ = ["adam", "sgd"]\n'
            ),
            "jdist/optim/algorithms/adam.py": "",
            "jdist/optim/algorithms/sgd.py": "",
        },
        "exports adam, which hides its module of that name",
    ),
    "a crowded folder": (
        {f"jdist/optim/algorithms/a{i}.py": "" for i in range(16)},
        "16 modules in one folder",
    ),
}


def test_the_house_stands():
    """No file departs from the design."""
    assert violations(ROOT) == []


@pytest.mark.parametrize("name", PLANTED)
def test_each_departure_is_seen(name, tmp_path):
    """A toy tree with one planted departure yields exactly that one."""
    file, text, message = PLANTED[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert message in found


@pytest.mark.parametrize("name", PLANTED_TOGETHER)
def test_each_departure_of_files_together_is_seen(name, tmp_path):
    """A toy tree of several files with one departure yields exactly that one."""
    files, message = PLANTED_TOGETHER[name]
    for file, text in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Planted."""\n{text}')
    (found,) = violations(tmp_path)
    assert message in found


def test_every_room_that_is_drawn_is_there():
    """A room that went leaves the drawing too."""
    for part, levels in ROOMS.items():
        for room in " ".join(levels).split():
            place = ROOT / "jdist" / part / room
            assert place.is_dir() or place.with_suffix(".py").is_file(), place


def drawn(page):
    """The paths that the first drawing of docs/architecture.md has, folders with /."""
    drawing = page.read_text().split("```")[1]
    folders = []
    for line in drawing.splitlines():
        # Names stand before the text, which two spaces or more set apart.
        names = re.match(r"( *)((?:[\w.]+(?:/|\.py)(?:  ?|$))+)", line)
        if names is None:
            continue
        depth = len(names[1]) // 2
        for name in names[2].split():
            folders[depth:] = [name]
            yield "".join(folders)


def test_the_page_draws_every_room():
    """Each folder of `jdist` and of its parts, each file beside the parts."""
    shown = set(drawn(ROOT / "docs" / "architecture.md"))
    library = ROOT / "jdist"
    rooms = {path.parent for path in library.rglob("*.py")}
    folders = {
        f"{room.relative_to(ROOT).as_posix()}/"
        for room in rooms
        if len(room.relative_to(library).parts) <= 2
    }
    files = {path.relative_to(ROOT).as_posix() for path in library.glob("[!_]*.py")}
    files |= {path.relative_to(ROOT).as_posix() for path in library.glob("_[!_]*.py")}
    assert shown == folders | files


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "docs" / "architecture.md",
        *sorted((ROOT / "docs" / "design").glob("*.md")),
    ],
    ids=lambda page: page.stem,
)
def test_a_page_of_the_design_names_files_that_exist(page):
    """Below the repository or below jdist; folders too."""
    for path in re.findall(r"`((?:\w+/)+\w+(?:\.py)?)`", page.read_text()):
        assert any((ROOT / folder / path).exists() for folder in ("", "jdist")), path


def test_what_is_allowed_passes(tmp_path):
    """Downward imports, a rich console and a long docstring are fine."""
    path = tmp_path / "jdist/data_parallel/a.py"
    path.parent.mkdir(parents=True)
    docstring = '    """Doc.\n' + "    text\n" * 70 + '    """\n'
    path.write_text(
        '"""D."""\nfrom jdist import reduction\nfrom jdist.optim import sgd\n'
        f"console.print(reduction)\ndef f():\n{docstring}    return sgd\n"
    )
    assert violations(tmp_path) == []
