"""Workers killed and frozen at random moments: all who need them are told, in time.

`JDIST_KILLS=400 JDIST_KILLS_SEED=1 pytest tests/rpc/test_kills.py --log-cli-level=INFO`
draws more of them and shows how long the slowest took, by what went on.
"""

import logging
import os
import random
import signal
import threading
from collections import defaultdict

import pytest

from tests.rpc import kills, lost_workers
from tests.rpc.group.test_liveness import DEATH, FROST, Group, results

DRAWS = int(os.environ.get("JDIST_KILLS", "3"))
SEED = int(os.environ.get("JDIST_KILLS_SEED", "0"))

_took = defaultdict(list)


@pytest.fixture(scope="module", autouse=True)
def _shown():
    yield
    log = logging.getLogger(__name__)
    for (name, blow), seconds in sorted(_took.items()):
        shown = f"{len(seconds)} times, the slowest after {max(seconds):.3f} s"
        log.info("%s, %s: %s", name, signal.Signals(blow).name, shown)


@pytest.mark.parametrize("number", range(DRAWS))
def test_a_worker_is_lost_at_a_random_moment(fresh_hosts, number):
    draw = random.Random(f"{SEED}/{number}")
    # The first draws are one of each kind, and the seed chooses the rest.
    name = list(kills.OPERATIONS)[(number + SEED) % len(kills.OPERATIONS)]
    blow = draw.choice([DEATH, FROST])
    victim = draw.choice([2, 2, 0])
    group = Group(fresh_hosts(3), blow, victim)
    ready = [
        group.hosts.run(rank, kills.prepare, name, group.lost) for rank in (0, 1, 2)
    ]
    assert ready == [None] * 3
    if name == "shutdown":
        ending = group.start(lost_workers.shut_down)
        wait(draw.uniform(0.0, 0.02))
        begun = group.hit()
        seen = group.end(ending)
    else:
        together = range(3) if name == "barrier" else group.left
        tasks = group.start(kills.until_lost, name, group.lost, ranks=together)
        wait(draw.uniform(0.0, 0.3))
        begun = group.hit()
        seen = list(results({rank: tasks[rank] for rank in group.left}).values())
        for one in seen:
            assert (one.kind, one.worker) == ("WorkerLost", group.lost), one
        if blow == FROST and name == "barrier":
            group.hosts.signal(victim, signal.SIGCONT)
            assert tasks[victim].result().kind == "WorkerLost"
        group.run(kills.forget)
        group.end()
    _took[name, blow].append(max(one.at for one in seen) - begun)


def wait(seconds):
    threading.Event().wait(seconds)
