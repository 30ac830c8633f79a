"""Jobs of two pinned processes: PipeDream's epochs, its stages alone, and 1F1B."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._pair import Job, Spent, timed
from benchmarks._pipeline_jdist import WORKERS, examples, losses, stage_params, stages
from jdist import optim, pipeline, rpc
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.weight_stashing.stashed_stage import StashedStage
from jdist.reduction import Partial

ROWS = (64, 128, 256, 512)
LENGTHS = (4, 16)
"""Micro-batches of a short and a long epoch; the bubble cancels in the difference."""
FLUSH = 8
ALONE, STASHING, MACRO, SYNCHRONOUS = (
    "stages alone",
    "PipeDream",
    f"PipeDream, an update every {FLUSH}",
    f"1F1B with a flush, m = {FLUSH}",
)
SGD = optim.sgd(lr=1e-3)


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """Every contender with every number of rows; seconds are per micro-batch."""
    rpc.init_rpc(f"worker{rank}")
    yield {
        f"{rows} rows: {name}": job
        for rows in ROWS
        for name, job in _jobs(rank, rows).items()
    }
    rpc.shutdown()


def _jobs(rank: int, rows: int) -> dict[str, Job]:
    def make(schedule: pipeline.Schedule) -> pipeline.Pipeline:
        return pipeline.Pipeline(stages(), losses, schedule, WORKERS, optimizer=SGD)

    each = make(pipeline.pipedream(2, 2))
    macro = make(pipeline.pipedream(2, 2, update_every=FLUSH))
    synchronous = make(pipeline.one_f_one_b(2, FLUSH))
    return {
        ALONE: functools.partial(_alone, Alone(rank, rows)),
        STASHING: functools.partial(_steady, _epochs(each, rows)),
        MACRO: functools.partial(_steady, _epochs(macro, rows)),
        SYNCHRONOUS: functools.partial(_steps, _training(synchronous, FLUSH * rows)),
    }


def _alone(call: Callable[[int], Any], calls: int) -> Spent:
    rpc.barrier()
    whole = timed(lambda: call(LENGTHS[1]), jax.block_until_ready, calls)
    return _each(whole, LENGTHS[1])


def _steady(epoch: Callable[[int], Any], calls: int) -> Spent:
    """The time that one micro-batch adds to an epoch."""
    short, long = LENGTHS
    found = []
    for length in LENGTHS:
        rpc.barrier()
        run = functools.partial(epoch, length)
        found.append(timed(run, jax.block_until_ready, calls))
    return _each(Spent(*np.subtract(found[1], found[0]).tolist()), long - short)


def _steps(step: Callable[[], Any], calls: int) -> Spent:
    rpc.barrier()
    return _each(timed(step, jax.block_until_ready, calls), FLUSH)


def _each(spent: Spent, count: int) -> Spent:
    return Spent(spent.elapsed / count, spent.processor / count)


def _epochs(runtime: pipeline.Pipeline, rows: int) -> Callable[[int], Any]:
    batch, states = examples(rows), [runtime.init(stage_params())]

    def epoch(length: int) -> Any:
        state, _ = runtime.train_epoch(states.pop(), [batch] * length)
        states.append(state)
        return state.params

    return epoch


def _training(pipe: pipeline.Pipeline, rows: int) -> Callable[[], Any]:
    batch, states = examples(rows), [pipe.init(stage_params())]

    def step() -> Any:
        # Popped, because a step donates its state.
        state, _ = pipe.train_step(states.pop(), batch)
        states.append(state)
        return state.params

    return step


class Alone:
    """The passes and updates of one stage, without any communication.

    Args:
      number: The index of the stage.
      rows: Examples in a micro-batch.
    """

    def __init__(self, number: int, rows: int) -> None:
        self._stage = stages()[number]
        first = frozenset(self._stage.inputs if number == 0 else ())
        self._compiled = self._stage.compiled(first, number)
        self._params = stage_params()[number]
        batch = examples(rows)
        self._input, self._target = batch["x"], {"target": batch["target"]}
        self._weights = np.ones(rows, np.float32)
        loss = PipelineLoss(losses, ("y",), "mean").passes(self._target, ("target",))
        self._loss = loss if number else None
        self._cotangent = jnp.ones_like(self._input)

    def __call__(self, length: int) -> Any:
        """Runs `length` micro-batches."""
        stashing = pipeline.with_weight_stashing(SGD, 1)
        plain = StageRun(self._stage, self._compiled, self._params, None, None, "mean")
        used = {micro: micro for micro in range(length)}
        run = StashedStage(plain, stashing, used, SGD.init(self._params))
        for i in range(length):
            self._pass(run, i)
        return run.run.params

    def _pass(self, stashed: StashedStage, i: int) -> None:
        stashed.begin_forward(i)
        inputs, run = {self._stage.inputs[0]: self._input}, stashed.run
        ((name, output),) = run.forward(i, inputs).items()
        d_output = self._cotangent
        if self._loss is not None:
            _, found, _ = self._loss.both({name: output}, self._target, self._weights)
            d_output = found[name]
        share = Partial._make((np.float32(0), None, float(len(self._weights))))
        stashed.begin_backward(i)
        d_inputs = run.backward(i, {name: d_output}, share, False)
        stashed.end_backward(i)
        # The runtime waits as well, because it sends the gradient.
        jax.block_until_ready(d_inputs)
        stashed.update({}, 0)
