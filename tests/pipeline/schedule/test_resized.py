"""Schedules of one family for other numbers of micro-batches, and their policies."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import Schedule, UpdatePolicy, pipedream, split_drain

FAMILIES = {
    "gpipe": lambda m: pipeline.gpipe(3, m, replicas=(1, 2, 1)),
    "one_f_one_b": lambda m: pipeline.one_f_one_b(2, m, replicas=(2, 1)),
    "interleaved": lambda m: pipeline.interleaved(2, m, chunks=3),
    "looped_bfs": lambda m: pipeline.looped_bfs(3, m, chunks=2),
    "zero_bubble": lambda m: pipeline.zero_bubble(3, m),
    "zbv": lambda m: pipeline.zbv(2, m),
    "v_half": lambda m: pipeline.v_half(2, m),
    "v_min": lambda m: pipeline.v_min(3, m),
    "dualpipe_v": lambda m: pipeline.dualpipe_v(2, m),
    "pipedream": lambda m: pipeline.pipedream(2, m, replicas=(2, 1), update_every=3),
    "vertical_sync": lambda m: pipeline.pipedream(3, m, policy="vertical_sync"),
    "pipedream_2bw": lambda m: pipedream(3, m, update_every=4, policy="2bw"),
    "pipedream_flush": lambda m: pipeline.pipedream(
        3, m, update_every=2, policy="flush"
    ),
    "split_drain": lambda m: split_drain(pipeline.gpipe(3, m)),
    "synchronous": lambda m: pipeline.pipedream(3, m).synchronous(),
    "both": lambda m: split_drain(pipeline.pipedream(3, m).synchronous()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_resized_is_made_anew(family):
    """With all that a schedule promises, there and back, by pickle too."""
    made, other = FAMILIES[family](4), FAMILIES[family](6)
    for found in (made.resized(6), pickle.loads(pickle.dumps(made)).resized(6)):
        assert found == other
        for field in ("name", "forward_only"):
            assert getattr(found, field) == getattr(other, field), field
    assert made.resized(6).resized(4) == made
    assert made.resized(4) is made


def test_what_cannot_be_resized():
    own = Schedule.of([["0F0", "0B0"]])
    assert own.resized(1) is own
    with pytest.raises(ValueError, match=r"must be the 1 that its actions were .*by a"):
        own.resized(2)
    with pytest.raises(ValueError, match=r"resized\(micro_batches=.*at least 1. Got 0"):
        pipeline.gpipe(2, 2).resized(0)
    with pytest.raises(ValueError, match="at least 4, one per stage"):
        pipeline.dualpipe_v(2, 4).resized(3)
    replaced = replace(pipeline.pipedream(2, 2), update_policy=UpdatePolicy("flush"))
    with pytest.raises(ValueError, match=r"must keep .*'flush'.*'stashing'.*Give"):
        replaced.resized(4)


def test_synchronous_keeps_the_actions():
    made = pipeline.pipedream(3, 5, replicas=(1, 2, 1))
    found = made.synchronous()
    assert found.columns == made.columns
    assert found.update_policy is None
    assert found.validate().resized(7).update_policy is None


@pytest.mark.parametrize("rule", ["stashing", "vertical_sync", "2bw", "flush"])
def test_one_version_at_all_stages(rule):
    """A micro-batch uses the same one at all stages, but under stashing."""
    make = {
        "stashing": lambda n: pipeline.pipedream(n, 30, update_every=n),
        "vertical_sync": lambda n: pipeline.pipedream(
            n, 30, update_every=n, policy="vertical_sync"
        ),
        "2bw": lambda n: pipeline.pipedream(n, 30, policy="2bw"),
        "flush": lambda n: pipeline.pipedream(n, 30, policy="flush"),
    }[rule]
    for n in (2, 3, 5):
        schedule = make(n)
        assert schedule.update_policy == UpdatePolicy(rule, n)
        used = schedule.versions_used()
        assert bool(np.all(used == used[:1])) == (rule != "stashing")
        assert used.max() > 3
