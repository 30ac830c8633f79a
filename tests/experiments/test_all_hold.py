"""Every experiment's quick form holds, from a fresh process and a plain environment."""

import functools

import pytest

from experiments import _runner
from tests.experiments.quick import check_held, run_quick

pytestmark = pytest.mark.optimized

# Run and looked at more closely by test_main_job.py.
OTHERS = [name for name in _runner.names() if name != "data_parallel_equivalence"]
# A process for several of them imports JAX, Flax and Matplotlib once. One for all would
# take longer than a single test may.
PROCESSES = 7
GROUPS = [OTHERS[number::PROCESSES] for number in range(PROCESSES)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(group)`: what its process said, and the folder of its results."""

    @functools.cache
    def run(number):
        folder = tmp_path_factory.mktemp("results")
        return run_quick(folder, *GROUPS[number]), folder

    return run


@pytest.mark.parametrize("number", range(PROCESSES))
def test_the_command_ends_well(run, number):
    """With exit status 0, the last experiment's line at the end, and the page."""
    done, folder = run(number)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Proved in ")
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_the_quick_form_holds(run, name):
    """A line at its end, JSON and pictures."""
    done, folder = run(OTHERS.index(name) % PROCESSES)
    check_held(done, folder, name)
    assert list(folder.glob(f"{name}-*.png"))
