"""Plans shown, written, read, drawn, and played through the simulator."""

import math

import numpy as np
import pytest
from rich.console import Console

from jdist.pipeline import load_plan, load_profile, partition, simulate
from tests.pipeline.plans import PROFILES, random_profile


@pytest.fixture(scope="module")
def vgg():
    profile = load_profile(PROFILES / "vgg16.txt")
    return profile, partition(profile, (4, 4), (12e9, 1.25e9))


def test_there_and_back(vgg, tmp_path):
    plan = vgg[1]
    assert load_plan(plan.write(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[]", "format jdist.pipeline.plan/1. Got None"),
        ('{"format": "other"}', "Got 'other'|Got other"),
        ('{"format": "jdist.pipeline.plan/1"}', "everything.*bottleneck_time"),
        ('{"format": "jdist.pipeline.plan/1", "stages": 3}', "everything.*stages"),
    ],
)
def test_other_files_are_refused(text, match, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        load_plan(path)


def test_the_table_and_the_line(vgg):
    plan = vgg[1]
    assert str(plan).startswith(f"{plan.configuration} on 4 x 4 workers: 66.89 ms")
    assert str(plan).endswith("2.00 times data parallel")
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(plan)
    shown = console.export_text()
    assert str(plan) in shown
    for number, stage in enumerate(plan.stages):
        row = next(r for r in shown.splitlines() if r.startswith(f"│ {number} "))
        assert f"({len(stage.layers)})" in row
        assert f"{plan.bytes_per_worker[number] / 2**20:.1f}" in row


def test_a_simulation_reaches_the_bottleneck(rng):
    """Micro-batches leave a straight pipeline at the planner's pace, fill aside."""
    for _ in range(5):
        profile = random_profile(rng, layers=6, chain=True)
        plan = partition(profile, 3, 1e9, transfers=False, replicate=False)
        found = [simulate(plan.schedule(m), plan.costs()).makespan for m in (400, 800)]
        assert (found[1] - found[0]) / 400 == pytest.approx(plan.bottleneck_time)


@pytest.mark.parametrize(
    ("workers", "bandwidths"),
    [((5,), (9.0,)), ((3, 2), (30.0, 5.0)), ((2, 2, 3), (90.0, 20.0, 4.0))],
)
def test_reductions_make_up_the_bottleneck(rng, workers, bandwidths):
    """The slowest stage, computing and joining gradients, takes the planner's time;
    a simulation is never faster, and not slower where all replicas do the same."""
    replicated = 0
    for layers in (1, 4, 4, 4, 4, 4):
        profile = random_profile(rng, layers, chain=True)
        plan = partition(profile, workers, bandwidths, transfers=False)
        costs = plan.costs(reductions=True)
        counts = [len(stage.ranks) for stage in plan.stages]
        busy = (costs.forward + np.array(costs.backward)) / counts
        assert max(busy) == pytest.approx(plan.bottleneck_time, rel=1e-12)
        assert [r > 0 for r in plan.reduction_seconds] == [n > 1 for n in counts]
        replicated += len(counts) > 1 and max(counts) > 1
        micro_batches = 20 * math.lcm(*counts)
        found = simulate(plan.schedule(micro_batches), costs).makespan
        least = micro_batches * plan.bottleneck_time
        assert found >= least * (1 - 1e-12)
        if layers == 1:
            assert plan.bottleneck_time == pytest.approx(plan.data_parallel_time)
            assert found == pytest.approx(least)
    assert replicated


def test_in_flight_is_what_the_schedule_keeps(vgg):
    """Activations and versions of the simulated schedule are those the plan counts."""
    profile = vgg[0]
    for workers, bandwidths in ((4, 1e9), (16, 1.25e9)):
        plan = partition(profile, workers, bandwidths)
        found = simulate(plan.schedule(300), plan.costs())
        expected = [
            flight
            for flight, stage in zip(plan.in_flight, plan.stages, strict=True)
            for _ in stage.ranks
        ]
        assert list(found.weight_versions) == expected
        assert list(found.peak_activations) == expected
        held = [
            held
            for held, stage in zip(plan.bytes_per_worker, plan.stages, strict=True)
            for _ in stage.ranks
        ]
        assert found.peak_bytes == pytest.approx(held)
