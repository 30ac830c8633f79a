"""The quick forms of all experiments, in halves: files of tests run side by side."""

from experiments import _runner
from tests.experiments.quick import check_held, run_quick

# Run and looked at more closely by test_main_job.py.
OTHERS = [name for name in _runner.names() if name != "data_parallel_equivalence"]
# A process for several of them imports JAX, Flax and Matplotlib once. One for all would
# take longer than a single test may.
PROCESSES = 16
GROUPS = [OTHERS[number::PROCESSES] for number in range(PROCESSES)]

_ran = {}


def numbers(half):
    """The processes of a half."""
    return range(half, PROCESSES, 2)


def names(half):
    """The experiments of a half."""
    return [name for number in numbers(half) for name in GROUPS[number]]


def ran(folders, number):
    """What a process said, and the folder of its results; it is run once."""
    if number not in _ran:
        folder = folders.mktemp("results")
        _ran[number] = run_quick(folder, *GROUPS[number]), folder
    return _ran[number]


def check_end(folders, number):
    """With exit status 0, the last experiment's line at the end, and the page."""
    done, folder = ran(folders, number)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Proved ")
    assert (folder / "report.html").exists()


def check_quick_form(folders, name):
    """A line at its end, JSON and pictures."""
    done, folder = ran(folders, OTHERS.index(name) % PROCESSES)
    check_held(done, folder, name)
    assert list(folder.glob(f"{name}-*.png"))
