"""The claims of `pipeline_schedules` are false where the runs are not as foretold."""

from dataclasses import replace

import pytest

from experiments import pipeline_schedules as job
from jdist.pipeline import Costs, simulate

SIZES = job.QUICK


def runs(name, **changes):
    """Runs that are their own predictions, but for one, which differs."""
    found = {}
    for known, family in job.FAMILIES.items():
        schedule = family.make(SIZES.micro_batches)
        told = simulate(schedule, Costs(**SIZES.memory(family)))
        found[known] = job.Runs(told, told, 0.0)
    measured = replace(found[name].measured, **changes)
    error = found[name].predicted.makespan / measured.makespan - 1
    return {**found, name: job.Runs(measured, found[name].predicted, error)}


def failed(claims):
    return [claim.text for claim in claims if not claim.holds]


def test_what_is_as_foretold_holds():
    assert failed(job.memory_claims(runs("GPipe"), SIZES)) == []
    assert failed(job.time_claims(runs("GPipe"))) == []


def test_a_byte_too_much_is_seen():
    kept = runs("GPipe")["GPipe"].measured.activation_bytes
    changed = runs("GPipe", activation_bytes=(kept[0] + 1, kept[1]))
    texts = failed(job.memory_claims(changed, SIZES))
    assert texts[0] == "GPipe: each worker kept the simulated activations, to the byte"


def test_a_byte_less_between_the_halves_is_seen():
    kept = runs("ZB-H1")["ZB-H1"].measured.activation_bytes
    less = runs("ZB-H1", activation_bytes=(kept[0], kept[1] - 1))
    (text,) = failed(job.memory_claims(less, SIZES))
    assert text == "ZB-H1: each worker kept the simulated activations, to the byte"


def test_neighbours_on_one_worker_may_share_but_not_keep_more():
    kept = runs("ZBV")["ZBV"].measured.activation_bytes
    less = runs("ZBV", activation_bytes=(kept[0], kept[1] - 1))
    assert failed(job.memory_claims(less, SIZES)) == []
    more = runs("ZBV", activation_bytes=(kept[0], kept[1] + 1))
    (text,) = failed(job.memory_claims(more, SIZES))
    assert text == "ZBV: no worker kept more activations than simulated"


def test_another_order_is_seen():
    other = runs("GPipe")["1F1B"].measured.columns
    texts = failed(job.memory_claims(runs("GPipe", columns=other), SIZES))
    assert texts == ["GPipe: every action ran once, in the order of the schedule"]


@pytest.mark.parametrize(("factor", "holds"), [(1.1, True), (0.9, True), (1.2, False)])
def test_a_time_that_was_not_foretold_is_seen(factor, holds):
    run = runs("1F1B")["1F1B"].measured
    changed = runs("1F1B", start=run.start * factor, end=run.end * factor)
    assert (failed(job.time_claims(changed)) == []) == holds
