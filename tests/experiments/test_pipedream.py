"""The claims of `pipedream` are false where the figures are."""

from types import SimpleNamespace

import pytest

from experiments import pipedream as job
from jdist.pipeline.epoch import Pass


def passes(stale=0, held=0):
    """The last batch's backward pass at each stage, and what is too much there."""
    return [
        Pass("B", j, j, 9, 9, 9 + job.STAGES - 1 - j + stale, job.STAGES - j + held)
        for j in range(job.STAGES)
    ]


def failing(sync=0.95, stash=0.94, right=True, caught=True, fast=1.0, record=None):
    runs = {
        "1F1B": [job.Curve([0.1, sync]), job.Curve([0.1, sync])],
        "PipeDream": [job.Curve([0.1, stash], record or passes())],
    }
    reports = {
        "PipeDream": SimpleNamespace(ok=right, worst=0.1),
        "no stashing": SimpleNamespace(ok=not caught, worst=1e9),
    }
    seconds = {"PipeDream": fast, "1F1B": 1.0}
    return [c.text for c in job.claims(runs, reports, seconds) if not c.holds]


def test_what_should_hold_holds():
    assert failing() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sync": 0.8, "stash": 0.8}, "1F1B learns"),
        ({"stash": 0.92}, "stashing is at most"),
        ({"right": False}, "with stashing, an update is"),
        ({"caught": False}, "without, the judge sees"),
        ({"fast": 1.01}, "simulated, PipeDream's epoch"),
        ({"record": passes(stale=1)}, "stage j of n uses weights"),
        ({"record": passes(held=1)}, "and keeps n - j versions"),
    ],
)
def test_a_deviation_is_seen(changes, text):
    (found,) = failing(**changes)
    assert found.startswith(text)


def test_micro_batches_make_up_their_batch():
    """In order: 2BW's update is over the rows of one batch."""
    batch = job.named(job.data(3, 1, job.BATCH).batches[0])
    parts = job.cut([batch])
    assert len(parts) == job.STAGES
    together = [label for part in parts for label in part["labels"]]
    assert together == list(batch["labels"])
