"""Measurement of the timeline of a pipeline's step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from jdist._errors import check_function, check_type, value_error
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.simulation.timeline import Record, StageBytes, Timeline

T = TypeVar("T")


def timed(pipe: Pipeline, step: Callable[[], T]) -> tuple[T, Timeline]:
    """Run a step and measure the start and the end of each of its actions.

    With workers in several processes each of them calls it, and gets the timeline of
    all workers on the clock of the first one. The clocks are compared by 20 round
    trips; the error is at most half of the shortest (some 30 us on one machine).

    Each action is waited for (see `ActionTimer`), so that a timed step may take longer
    than others. Several workers of one process share a thread, which executes their
    actions in turn: the seconds of each action are valid costs of a simulation, but the
    makespan is not that of a pipeline.

    Args:
      pipe: The pipeline.
      step: Runs one step of it, `value_and_grad` or `train_step`; the last one counts
        if it runs several. The times include compilation within an action. Programs of
        workers in several processes are compiled before the first action instead.

    Returns:
      The return value of `step`, and the timeline, with the most bytes that each worker
      held for backward passes, and those of each stage; for a worker on a mesh, the
      bytes on each device.

    Raises:
      ValueError: `step` ran no step of this pipeline; or its workers are a mesh, where
        one program executes all actions and their ends cannot be observed.
      Exception: The error of `step`; WorkerLost and RpcTimeout.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import pipeline
      >>> stage = pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))
      >>> pipe = pipeline.Pipeline([stage], lambda y, batch: y, pipeline.gpipe(1, 2))
      >>> batch = {"x": jnp.arange(4.0)}
      >>> (loss, _), timeline = timed(
      ...     pipe, lambda: pipe.value_and_grad([jnp.float32(3)], batch)
      ... )
      >>> float(loss), [f"{r.kind}{r.micro_batch}" for r in timeline.records()]
      (4.5, ['F0', 'F1', 'B0', 'B1'])
    """
    check_type("timed(pipe)", pipe, Pipeline, "must be a Pipeline")
    check_function("timed(step)", step, "must be a function without arguments")
    if not pipe.executor.runs_actions:
        rule = "must have workers or devices of their own, not a mesh"
        remedy = "One program does all actions: profile it with jax.profiler."
        raise value_error("timed(pipe)", rule, "a mesh", remedy)
    pipe.action_timer = watch = ActionTimer()
    before = pipe.communicator.failure
    try:
        result = step()
    except BaseException:
        failure = pipe.communicator.failure
        if failure is not None and failure is not before:
            raise  # A call that failed has failed on all workers.
        # The other workers are in a call, or wait below: an empty call that fails here
        # fails on all of them.
        with pipe.communicator.opened("timed"):
            raise
    finally:
        pipe.action_timer = None
    # A barrier: after it no worker computes, so that the first one answers at once and
    # round trips are short.
    pipe.communicator.gather(None, "comparing clocks")
    with pipe.communicator.opened("timed") as channels:
        offset = pipe.communicator.clock_offset()
        # All records on the clock of the first worker.
        own = [
            tuple(record._replace(start=record.start + offset, end=record.end + offset))
            for record in watch.records
        ]
        gathered = channels.agree((own, watch.held, watch.kept))
    held: dict[int, int] = {}
    for _, theirs, _ in gathered:
        # Each worker is in one process: no entry is overwritten.
        held |= theirs
    kept = [of_stages for _, _, of_stages in gathered]
    timed: dict[frozenset[int], list[Record]] = {}
    for records, *_ in gathered:
        # Messages turn named tuples into plain ones.
        made = [Record(*record) for record in records]
        # Processes of one worker have timed the same actions: the first one counts.
        timed.setdefault(frozenset(each.worker for each in made), made)
    timeline = Timeline.from_records(
        [record for made in timed.values() for record in made],
        name=f"{pipe.schedule.name}, measured",
    )
    bytes_held = tuple(float(held.get(w, 0)) for w in range(timeline.workers))
    return result, replace(
        timeline, activation_bytes=bytes_held, stage_bytes=_stage_bytes(kept)
    )


def _stage_bytes(kept: Sequence[Mapping[int, Sequence[int]]]) -> StageBytes:
    """Bytes of all stages, each the maximum over the processes that run it."""
    stages = sorted(set().union(*kept))
    rows = [np.max([own[j] for own in kept if j in own], axis=0) for j in stages]
    return StageBytes(*np.array(rows, np.float64).T)
