"""`make chaos SEED=n`: one seed, one plan of delays and one choice of tests."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import chaos

ROOT = Path(__file__).parents[1]
PLACES = ("task worker1 rpc", "call worker2", "from worker5")


def delays(seed, count=300):
    plan = chaos.Plan(seed)
    return [plan.delay(place, n) for place in PLACES for n in range(count)]


def test_a_seed_is_one_plan():
    """In every process: texts are hashed otherwise in each."""
    program = "from tests.test_chaos import delays; print(delays(7))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, timeout=120, cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "11", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == f"{delays(7)}\n"
    assert delays(7) != delays(11)


def test_delays_are_short_and_not_everywhere():
    found = delays(5)
    waiting = [seconds for seconds in found if seconds]
    assert 0.3 < len(waiting) / len(found) < 0.42
    assert 0.05 < max(waiting) <= 0.1
    assert sum(seconds > 0.02 for seconds in waiting) < 0.02 * len(found)
    plan = chaos.Plan(5)
    assert not any(plan.delay(PLACES[0], 500 + n) for n in range(100))


def test_the_next_passage_waits_as_the_plan_says(monkeypatch):
    slept = []
    monkeypatch.setattr(chaos.time, "sleep", slept.append)
    plan = chaos.Plan(6)
    for n in range(50):
        for place in PLACES:
            plan.pause(place)
            slept.append((place, n))
    told = []
    for n in range(50):
        for place in PLACES:
            seconds = plan.delay(place, n)
            told += [seconds] if seconds else []
            told.append((place, n))
    assert slept == told
    assert plan.passages == len(slept) - 150 > 0


def test_a_seed_chooses_its_part_of_the_tests():
    names = [
        f"{folder}/test_a.py::test_b[{n}]"
        for folder in chaos.SUBJECTS
        for n in range(40)
    ]
    items = [
        SimpleNamespace(nodeid=name)
        for name in [*names, "tests/optim/test_a.py::test_b"]
    ]
    kept, left = chaos.keep(items, chaos.Plan(7), 0.25)
    assert 0.1 < len(kept) / len(items) < 0.4
    assert sorted(map(id, kept + left)) == sorted(map(id, items))
    assert items[-1] in left
    assert chaos.keep(items, chaos.Plan(7), 0.25)[0] == kept
    assert chaos.keep(items, chaos.Plan(11), 0.25)[0] != kept


HAND_OFFS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from tests import chaos
from jdist import rpc

gate = threading.Event()

def double(x):
    return 2 * x

def hold():
    gate.wait()

with rpc.local_cluster(["a", "b"], allow=["__main__"]):
    for n in range(25):
        rpc.rpc_sync("b", double, args=(n,))
        rpc.rpc_async("b", double, args=(n,)).wait()
    with suppress(rpc.RpcTimeout):
        rpc.rpc_async("b", hold, timeout=0.05).wait()
    gate.set()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(double, 5).result()
print(*sorted({place.split()[0] for place in chaos.PLAN._counts}))
assert chaos.PLAN.passages > 20
"""


def test_every_kind_of_hand_off_is_delayed():
    """In a process that was given a seed; in others nothing is changed."""
    environment = os.environ | {"JDIST_CHAOS": "5", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", HAND_OFFS],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = "call condition exchange from future reply task thread timer work"
    assert set(kinds.split()) <= set(done.stdout.split())
    if not os.environ.get(chaos.VARIABLE):
        assert chaos.PLAN is None


def test_the_subjects_are_there():
    for subject in chaos.SUBJECTS:
        assert (ROOT / subject).exists()


@pytest.mark.parametrize("seed", [1, 2])
def test_ci_runs_a_few_seeds(seed):
    assert re.search(rf"^make chaos SEED={seed} ", (ROOT / ".ci/run").read_text(), re.M)
