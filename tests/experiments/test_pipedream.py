"""The claims of `pipedream` are false where the figures are."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import _pipedream_clocks as clocks
from experiments import _pipedream_runs as runs_of
from experiments import pipedream as job
from jdist import pipeline
from jdist.pipeline.weight_stashing.epoch import PassRecord

NETWORK = job.FULL[1]  # of two stages
FLUSH, STASH, CONTROL = runs_of.FLUSH, runs_of.STASH, runs_of.CONTROL


def passes(stale=0, held=0):
    """The last batch's backward pass at each stage, and what is too much there."""
    n = NETWORK.stages
    return [
        PassRecord("B", j, j, 9, 9, 9 + n - 1 - j + stale, n - j + held)
        for j in range(n)
        for j in range(n)
    ]


def found(sync=0.95, stash=0.94, none=0.93, fast=1.0, measured=None, record=None):
    runs = {
        FLUSH: [job.Curve([0.1, sync + off]) for off in (-0.01, 0.01)],
        STASH: [job.Curve([0.1, stash], record or passes())],
        CONTROL: [job.Curve([0.1, none])],
    }
    return job.Found(NETWORK, runs, {STASH: fast, FLUSH: 1.0, CONTROL: 1.0}, measured)


def epochs(fast):
    """Timed ones, of which one was disturbed."""
    return {STASH: [fast, 9.0, fast], FLUSH: [1.0] * 3, CONTROL: [1.0] * 3}


def failing(right=True, caught=True, **changes):
    reports = {
        STASH: SimpleNamespace(ok=right, worst=0.1),
        CONTROL: SimpleNamespace(ok=not caught, worst=1e9),
    }
    told = [*job.claims(found(**changes)), *job.judge_claims(reports)]
    return [claim.text for claim in told if claim.holds is False]


def test_what_should_hold_holds():
    assert failing() == failing(measured=epochs(0.9)) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sync": 0.8, "stash": 0.8}, "1F1B learns"),
        ({"stash": 0.92}, "with stashing it is at most 2% worse"),
        ({"right": False}, "with stashing, an update is the gradient"),
        ({"caught": False}, "without, the judge sees"),
        ({"fast": 1.01}, "least 1F1B's with flushes, simulated"),
        ({"measured": epochs(1.01)}, "least 1F1B's with flushes, measured"),
        ({"record": passes(stale=1)}, "stage j of 2 uses weights"),
        ({"record": passes(held=1)}, "and keeps 2 - j versions"),
    ],
)
def test_a_deviation_is_seen(changes, text):
    (told,) = failing(**changes)
    assert text in told


def test_the_control_is_described_by_its_accuracy():
    """In numbers: no claim is made about it."""
    note = job.control_note(found(none=0.5))
    assert note.endswith("50.0% without stashing, 94.0% with it, 95.0% with 1F1B.")


def test_processes_that_were_not_timed_are_not_judged():
    """In words; the simulated times are."""
    told = {c.text: c for c in job.claims(found()._replace(why_not="one core"))}
    text = f"{NETWORK.name}: PipeDream's throughput is at least 1F1B's with flushes"
    left = told[f"{text}, measured"]
    assert (left.verdict, left.why_not) == ("not judged", "one core")
    assert told[f"{text}, simulated"].holds


def test_seconds_are_measured_where_they_can_be():
    """In what is told, in the table and on the picture's axis."""
    simulated, measured = found(fast=0.5), found(fast=0.5, measured=epochs(0.9))
    assert (simulated.how, simulated.seconds[STASH]) == ("simulated", 0.5)
    assert (measured.how, measured.seconds[STASH]) == ("measured", 0.9)
    for each in (simulated, measured):
        figure = job.plot(each)
        assert each.how in figure.axes[1].get_xlabel()
        job.plt.close(figure)


def test_more_stages_than_cores_are_not_measured():
    assert "cores" in clocks.why_not(10**6)
    assert clocks.why_not(1) == ""


def test_epochs_are_timed_over_processes():
    """One for each of two stages, if there are cores for them."""
    stages = 1 if clocks.why_not(2) else 2
    tiny = runs_of.Network("tiny", "tiny", ((2,), ())[:stages], 0.1, 1, 1)
    timed = clocks.measured(tiny, 0, [FLUSH, STASH], rounds=1)
    assert list(timed) == [FLUSH, STASH]
    assert all(len(taken) == 1 and taken[0] > 0 for taken in timed.values())


def test_micro_batches_make_up_their_batch():
    """In order: 2BW's update is over the rows of one batch."""
    ((first, second, *_),), _ = runs_of.batches_of(3, 1)
    parts = runs_of.cut([first, second], runs_of.PARTS)
    assert len(parts) == 2 * runs_of.PARTS
    for key in first:
        whole = np.concatenate([first[key], second[key]])
        assert np.array_equal(np.concatenate([part[key] for part in parts]), whole)


def test_all_asynchronous_policies_have_one_order():
    """For which the simulator is asked once."""
    for stages in (2, 3, 4):
        made = (
            pipeline.pipedream(stages, 8),
            pipeline.pipedream(stages, 8, policy="2bw"),
        )
        assert made[0].columns == made[1].columns
