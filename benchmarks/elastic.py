"""What does it cost that replicas may come and go, and how long does a death hold up?

Steps: two pinned processes take steps of an elastic run and of `train_step` in turn.
Deaths: one of two replicas is killed in the middle of a step, and another takes its
place and fetches the state from the survivor. For comparison both are also started
again and resume from a checkpoint, as a run without elasticity does.
"""

import secrets
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks._ddp_models import MODELS, Model
from benchmarks._elastic_jdist import Place, Read, prepare, replica
from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Pair
from jdist.rpc import Processes as Spawned
from jdist.rpc import ProcessSettings, spawn

ROUNDS = 9
WARMUP = 2
DEATHS = 4
_SETTINGS = ProcessSettings(callback_threads=0)
_LIMIT = 120.0


def measure() -> list[Case]:
    """For each model the steps; for a small and a large one the deaths."""
    return [*_steps(), *(_deaths(model) for model in (MODELS[0], MODELS[2]))]


def _steps() -> list[Case]:
    with Pair(prepare, _SETTINGS) as pair:
        found: dict[str, list[float]] = {job: [] for job in pair.jobs}
        for turn in range(WARMUP + ROUNDS):
            for model in MODELS:
                calls = 3 * model.calls
                for job in (job for job in pair.jobs if job.startswith(model.name)):
                    spent = pair.run(job, calls)
                    if turn >= WARMUP:
                        found[job].append(spent.elapsed)
    return [
        _case(
            model,
            {
                job.removeprefix(f"{model.name}: "): timing(seconds)
                for job, seconds in found.items()
                if job.startswith(model.name)
            },
        )
        for model in MODELS
    ]


def _case(model: Model, timings: dict[str, Timing]) -> Case:
    goal = Goal("of train_step", ratio(timings["elastic"], timings["train_step"]), 1.05)
    size = _bytes(model) / 1e6
    note = f"a gradient has {size:.1f} MB, which cross the socket twice, by rank 0"
    return Case(f"step, {model.name}", timings, note=note, goals=[goal])


class Death(NamedTuple):
    """Seconds that one death took.

    Attributes:
      step: Until the survivor finished the step in which it happened.
      state: Until the newcomer had fetched the state.
      again: From the start of two new processes to a finished step.
    """

    step: float
    state: float
    again: float


def _deaths(model: Model) -> Case:
    found = [_death(model) for _ in range(DEATHS)]
    step, state, again = (list(seconds) for seconds in zip(*found, strict=True))
    rate = statistics.median(_bytes(model) / 1e6 / each for each in state)
    timings = {
        "from a death to the next finished step": timing(step),
        "a newcomer takes the state": timing(state),
        "both start again, to a finished step": timing(again),
    }
    note = f"the state has {_bytes(model) / 1e6:.1f} MB: {rate:.0f} MB/s"
    return Case(f"a death, {model.name}", timings, note=note)


def _death(model: Model) -> Death:
    # Enough epochs that the newcomer's process starts before the end.
    epochs = 40 * model.calls + 40
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        group = _port(), secrets.token_bytes(16)
        with (
            _started(Place(0, 0, *group), model, epochs, None, folder) as lasting,
            _started(Place(1, 1, *group), model, epochs, 6, folder),
        ):
            died = _moment(folder / "death1")
            with _started(Place(2, 1, *group), model, epochs, None, folder) as newcomer:
                read, _ = lasting.join(timeout=_LIMIT)[0]
                _, state = newcomer.join(timeout=_LIMIT)[0]
        group = _port(), secrets.token_bytes(16)
        began = time.monotonic()
        with (
            _started(Place(0, 0, *group), model, epochs + 4, None, folder) as first,
            _started(Place(1, 1, *group), model, epochs + 4, None, folder) as second,
        ):
            again, _ = first.join(timeout=_LIMIT)[0]
            second.join(timeout=_LIMIT)
    return Death(_finished(read, died) - died, state, again[1].elapsed - began)


def _started(
    place: Place, model: Model, epochs: int, dies_after: int | None, folder: Path
) -> Spawned:
    return spawn(
        replica,
        args=(place, model, epochs, dies_after, folder),
        nprocs=1,
        settings=_SETTINGS,
        join=False,
    )


def _moment(note: Path) -> float:
    """Polls until the time of death is noted; returns it."""
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    return float(note.read_text())


def _finished(read: list[Read], died: float) -> float:
    """The time at which rank 0 began the step after the death."""
    after = iter(each for each in read if each.elapsed > died)
    # Rank 0 computes the other's rows, which are not the first, and then its own again.
    next(each for each in after if each.row)
    return next(each.elapsed for each in after if not each.row)


def _bytes(model: Model) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights()))


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
