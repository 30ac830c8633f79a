"""Every experiment's quick form holds, from a fresh process and a plain environment."""

import pytest

from experiments import _runner
from tests.experiments.quick import check_held, run_quick

# Run and looked at more closely by test_main_job.py.
OTHERS = [name for name in _runner.names() if name != "data_parallel_equivalence"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All in one process, which imports JAX, Flax and Matplotlib once."""
    folder = tmp_path_factory.mktemp("results")
    return run_quick(folder, *OTHERS, timeout=1500), folder


@pytest.mark.parametrize("name", OTHERS)
def test_the_quick_form_holds(run, name):
    """A line at its end, JSON and pictures."""
    done, folder = run
    check_held(done, folder, name)
    assert list(folder.glob(f"{name}-*.png"))


def test_the_command_ends_well(run):
    """With exit status 0, the last experiment's line at the end, and the page."""
    done, folder = run
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Proved in ")
    assert (folder / "report.html").exists()
