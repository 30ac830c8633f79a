"""What `jdist.data_parallel` shows: what users may touch, and nothing else."""

import inspect
import subprocess
import sys

from jdist import data_parallel
from jdist.data_parallel import hooks


def test_completion_shows_the_public_names():
    for face in (data_parallel, hooks):
        assert dir(face) == sorted(face.__all__)
        assert all(hasattr(face, name) for name in face.__all__)


def test_rooms_and_helpers_are_not_among_them():
    """`hooks` is the one module that users name."""
    shown = [name for name in dir(data_parallel) if not name.startswith("_")]
    modules = [n for n in shown if inspect.ismodule(getattr(data_parallel, n))]
    assert modules == ["hooks"]
    assert len(shown) == 26


def test_one_process_does_not_import_rpc():
    """It doubles the modules, for a rendezvous of several processes."""
    program = "import sys, jdist.data_parallel; print('jdist.rpc' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout == "False\n", done.stderr
