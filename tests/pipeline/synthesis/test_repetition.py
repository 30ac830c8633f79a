"""Patterns that micro-batches repeat: periods known by hand, and long schedules."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import Costs, simulate, synthesize
from jdist.pipeline.synthesis import synthesizer
from jdist.pipeline.synthesis.problem import SchedulingProblem
from jdist.pipeline.synthesis.repetition import repetition

pytestmark = pytest.mark.skipif(
    find_spec("ortools") is None, reason="needs the extra synthesize"
)


def period(costs, limit, workers=(0, 1)):
    """In the unit of whole costs."""
    problem = SchedulingProblem.of(costs, workers, 1)
    if limit is not None:
        problem = replace(problem, limit=np.array(limit, float))
    whole, unit, _ = problem.in_whole_numbers(100.0)
    return repetition(whole, 1000, 60.0)[1] * unit


@pytest.mark.parametrize(
    ("costs", "limit", "expected"),
    [
        # Nothing but the busiest worker's work.
        (Costs(forward=[1, 2], backward=[3, 5], activation_bytes=1.0), None, 7),
        (Costs(activation_bytes=1.0), [2, 1], 3),
        # One micro-batch at a time, with whole backward passes.
        (Costs(activation_bytes=1.0), [1, 1], 6),
        (Costs(activation_bytes=1.0, latency=0.5), [1, 1], 7),
        # There is memory for the last stage's W while the first stage works.
        (Costs(activation_bytes=1.0), [1, 2], 5),
        # As soon as the operands of a W are no larger than activations.
        (Costs(activation_bytes=1.0, pending_bytes=1.0), [1, 1], 5),
    ],
)
def test_periods_known_by_hand(costs, limit, expected):
    assert period(costs, limit) == pytest.approx(expected, rel=1e-12)


def test_many_micro_batches_repeat_a_pattern(monkeypatch):
    """Nearly without idle time, with less memory than any family."""
    monkeypatch.setattr(synthesizer, "SEARCHED", 10)
    costs = Costs(activation_bytes=3.0, weight_bytes=1.0)
    given = {"workers": 2, "micro_batches": 40, "chunks": 2, "placement": "v"}
    found = synthesize(costs, **given, memory=14)
    assert found.schedule.name == "synthesized"
    assert max(found.peak) <= 14
    for family in (pipeline.v_min, pipeline.v_half, pipeline.zbv, pipeline.dualpipe_v):
        assert max(simulate(family(2, 40), costs).peak_bytes) > 14
    assert found.makespan == simulate(found.schedule.validate(), costs).makespan
    assert found.gap < 0.03
    # In the middle each worker does the same for each micro-batch.
    for worker in range(2):
        program = found.schedule.actions(worker)
        step = len(program) // 40
        middle = program[10 * step : 30 * step]
        later = [a._replace(micro_batch=a.micro_batch - 1) for a in middle[step:]]
        assert later == middle[:-step]


def test_unequal_stages_and_messages(monkeypatch, rng):
    """Never above the limit, nor slower than the best family that fits."""
    monkeypatch.setattr(synthesizer, "SEARCHED", 10)
    for limit in (3, 4, 6):
        costs = Costs(
            forward=rng.uniform(1, 2, 3),
            backward=rng.uniform(2, 3, 3),
            latency=0.3,
            message_bytes=0.2,
            bandwidth=1.0,
            activation_bytes=1.0,
        )
        found = synthesize(costs, workers=3, micro_batches=25, memory=limit, seconds=3)
        assert max(found.peak) <= limit
        split = pipeline.split_drain(pipeline.one_f_one_b(3, 25))
        assert found.lower_bound <= found.makespan <= simulate(split, costs).makespan


def test_micro_batches_that_differ_repeat_nothing(monkeypatch):
    """Their order is searched, however many they are."""
    monkeypatch.setattr(synthesizer, "SEARCHED", 10)
    monkeypatch.setattr(synthesizer, "repetition", None)
    forward = np.array([[1.0, 2.0, 1.0, 3.0], [2.0, 1.0, 3.0, 1.0]])
    found = synthesize(Costs(forward=forward), workers=2, micro_batches=4)
    assert found.gap == 0
