"""Elastic runs between processes that are killed, and that join, at random moments.

    JDIST_ELASTIC_HISTORIES=100 python -m pytest -s THIS_FILE

The seed of a history gives its replicas, how the sums are added up, and the moments;
what a process does at a moment is left to chance.
"""

import itertools
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.group.rendezvous import ReservedPort
from tests.data_parallel.elasticity.histories import (
    EXAMPLES,
    PARAMS,
    WEIGHTS,
    Watched,
    X,
    Y,
    curved_loss,
    elastic_run,
    exact_loss,
    exact_run,
)
from tests.rpc.elastic.common import join
from tests.rpc.hosts import Hosts

HISTORIES = int(os.environ.get("JDIST_ELASTIC_HISTORIES", "2"))
EPOCHS = 20
STEPS = EPOCHS * -(-EXAMPLES // 16)
SECONDS = 1.6  # In which things happen; a run takes longer, most often.
DEADLINE = 2.0  # Shorter than compilation under load: then shares are computed again.
LIMIT = 60.0


class Drawn(NamedTuple):
    """A history.

    Attributes:
      fixed: Whether sums are added up in a fixed order.
      replicas: At the beginning.
      events: A moment, and the number of a replica that is killed; None for a join.
      deadline: Seconds for a share, after which its replica is expelled.
    """

    fixed: bool
    replicas: int
    events: list[tuple[float, int | None]]
    deadline: float = DEADLINE


def drawn(seed):
    choose = random.Random(seed)
    replicas = choose.randint(2, 5)
    joins = choose.randint(0, 2)
    mortal = list(range(1, replicas + joins))
    killed = choose.sample(mortal, choose.randint(1, len(mortal)))
    killed += [0] * (choose.random() < 0.2)
    what = [*killed, *[None] * joins]
    moments = [(choose.uniform(0, SECONDS), each) for each in what]
    if len(killed) > 1 and choose.random() < 0.3:  # Two at once.
        moments[1] = (moments[0][0], killed[1])
    return Drawn(seed % 2 == 0, replicas, sorted(moments, key=lambda each: each[0]))


def replica(number, rank, port, seed, fixed, deadline, folder, prepare=None):
    """One replica, in a process of its own."""
    if prepare is not None:
        prepare(number)
    # Who comes after rank 0 has died waits for it.
    join(f"worker{number}", rank, port, join_timeout=8.0)
    choose = random.Random(seed)
    data = Watched(X, lambda _: time.sleep(choose.uniform(0, 0.02)))
    options = {"folder": folder, "save_every": 9, "timeout": deadline}
    if fixed:
        run = elastic_run(curved_loss, "mean", slots=5, **options)
    else:
        run = elastic_run(exact_loss, "sum", **options)
    state, losses = run.run(PARAMS, (data, Y), WEIGHTS, epochs=EPOCHS)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], losses


class Group:
    """The replicas of a run, and what becomes of them.

    Attributes:
      happened: Deaths and joins that were brought about.
      leaderless: Whether rank 0 was killed.
      when_over: What is called when a replica has come to the end, and with what.
    """

    def __init__(self, hosts, history, seed, folder, prepare=None):
        self._hosts, self._history = hosts, history
        self._seed = seed
        self._rest = (history.fixed, history.deadline, folder, prepare)
        self._tasks, self._ranks = {}, {}
        self.happened, self.leaderless, self.when_over = 0, False, {}

    def live(self):
        """Lets the events come about; what the survivors return, by number."""
        with ReservedPort() as reserved:
            numbers = itertools.count()
            for number in itertools.islice(numbers, self._history.replicas):
                self._start(number, reserved.port)
            began = time.monotonic()
            for moment, who in self._history.events:
                time.sleep(max(0.0, began + moment - time.monotonic()))
                if self._tasks[0].done():
                    break
                if who is None:
                    self._start(next(numbers), reserved.port)
                elif who in self._tasks:
                    self._hosts.signal(who, signal.SIGKILL)
                    del self._tasks[who], self._ranks[who]
                    self.leaderless = who == 0
                else:
                    continue  # It has not joined yet.
                self.happened += 1
                if self.leaderless:
                    break
            return self._outcomes()

    def _start(self, number, port):
        rank = min(set(range(number + 1)) - set(self._ranks.values()))
        self._ranks[number] = rank
        seed = self._seed * 10 + number
        self._tasks[number] = self._hosts.start(
            number, replica, number, rank, port, seed, *self._rest
        )

    def _outcomes(self):
        found = {}
        for number, task in self._tasks.items():
            try:
                found[number] = task.result(LIMIT)
            except (
                rpc.RpcError,
                EOFError,
            ) as error:  # EOFError: its process has ended.
                found[number] = error
            if number in self.when_over:
                function, arguments = self.when_over[number]
                function(*arguments)
        return found


@pytest.fixture(scope="module")
def uninterrupted(fork_server, tmp_path_factory):
    """What each order of sums has to give: parameters, if known, and losses."""
    made = {False: (None, dict(enumerate(map(float, exact_run(STEPS)[1]))))}
    hosts = Hosts(fork_server, 1)
    alone = Group(hosts, Drawn(True, 1, []), 0, tmp_path_factory.mktemp("alone"))
    made[True] = alone.live()[0]
    hosts.close()
    return made


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_processes_killed_at_random_moments_cost_no_example(
    seed, fresh_hosts, uninterrupted, tmp_path
):
    history = drawn(seed)
    print(f"seed {seed}: {history}")  # noqa: T201 - a failure shows it
    joins = sum(who is None for _, who in history.events)
    group = Group(fresh_hosts(history.replicas + joins), history, seed, tmp_path)
    found = group.live()
    if group.leaderless:
        assert all(isinstance(each, rpc.RpcError) for each in found.values())
        again = Group(fresh_hosts(2), Drawn(history.fixed, 2, []), seed, tmp_path)
        found = again.live()
    print(f"{group.happened} of {len(history.events)} came about")  # noqa: T201
    for number, each in found.items():
        if isinstance(each, rpc.RpcError) and number:
            assert "over" in str(each)  # It came too late.
        else:
            check(each, uninterrupted[history.fixed])
    if not group.leaderless:
        assert list(found[0][1]) == list(range(STEPS))


def check(found, uninterrupted):
    """What a replica returns is what the uninterrupted run gives."""
    (bits, own), (params, losses) = found, uninterrupted
    assert params is None or bits == params
    assert own == {step: losses[step] for step in own}
    assert list(own) == list(range(min(own, default=STEPS), STEPS))


def say_that_it_takes_part(folder, number, then=lambda: None):
    """Leaves a file at the first share that the replica computes."""
    read = Watched.__getitem__

    def read_and_say(data, rows):
        found = read(data, rows)
        if not isinstance(rows, slice):  # That only learns the types.
            (folder / f"replica{number}").touch()
            then()
        return found

    Watched.__getitem__ = read_and_say


def takes_part(folder, number):
    return (folder / f"replica{number}").exists()


def wait_until(happened, *arguments):
    end = time.monotonic() + LIMIT
    while not happened(*arguments):
        assert time.monotonic() < end, (happened, arguments)
        time.sleep(0.01)


def die_writing(folder, number):
    """Rank 0 dies in its first checkpoint, where it is to get its name."""
    # Not before another one takes part.
    waits = partial(wait_until, takes_part, folder, 1)
    say_that_it_takes_part(folder, number, (lambda: None) if number else waits)
    rename = os.rename

    def dies(old, new, **options):
        if not number and ".orbax-checkpoint-tmp" in str(old):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(old, new, **options)

    os.rename = dies


def test_rank_0_dies_writing_a_checkpoint(fresh_hosts, uninterrupted, tmp_path):
    """Another one writes its state, and none is read that was left in the middle."""
    folder, prepare = tmp_path / "run", partial(die_writing, tmp_path)
    group = Group(fresh_hosts(3), Drawn(True, 3, []), 0, folder, prepare)
    found = group.live()
    assert isinstance(found.pop(0), EOFError)
    assert all(isinstance(each, rpc.RpcError) for each in found.values())
    again = Group(fresh_hosts(1), Drawn(True, 1, []), 0, folder).live()
    check(again[0], uninterrupted[True])
    assert min(again[0][1]) > 1


def stand_still(folder, number):
    """Replica 2 stops once, when replica 1 takes part too."""
    stopped = []

    def stop():
        if number == 2 and not stopped and takes_part(folder, 1):
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)

    say_that_it_takes_part(folder, number, stop)


def is_stopped(process):
    """Whether a signal has stopped it: by its state, behind its name in parentheses."""
    state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


@pytest.mark.parametrize("returns", [True, False])
def test_who_stands_still_is_expelled(returns, fresh_hosts, uninterrupted, tmp_path):
    """The others go on without it. Continued in time it takes part again."""
    hosts = fresh_hosts(3)
    prepare = partial(stand_still, tmp_path)
    group = Group(hosts, Drawn(True, 3, []), 0, tmp_path / "run", prepare)
    go_on = hosts.signal, (2, signal.SIGCONT)

    def continue_it():
        wait_until(is_stopped, hosts.pids[2])
        time.sleep(1.1 * DEADLINE)
        hosts.signal(2, signal.SIGCONT)

    if returns:
        threading.Thread(target=continue_it, daemon=True).start()
    else:
        group.when_over[1] = go_on
    found = group.live()
    check(found[0], uninterrupted[True])
    check(found[1], uninterrupted[True])
    assert list(found[0][1]) == list(range(STEPS))
    if returns:
        check(found[2], uninterrupted[True])
    else:
        assert "over" in str(found[2])
