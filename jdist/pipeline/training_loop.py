"""The training loop: a step per batch, with checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from numpy.typing import ArrayLike

from jdist._errors import check_type
from jdist._fit import Metrics, check_batches, check_saving, fitted, pair
from jdist._tree import PyTree, check_state
from jdist.pipeline.checkpoint import PipelineCheckpoints
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.run.identity import CallArguments
from jdist.pipeline.run.update import PipelineState


def fit(
    pipe: Pipeline,
    state: PipelineState,
    batches: Iterable[PyTree],
    *,
    checkpoints: PipelineCheckpoints | None = None,
    save_every: int = 1000,
) -> tuple[PipelineState, list[Metrics]]:
    """Train on batches, one step for each.

    Every process of the pipeline calls it with the same batches.

    Args:
      pipe: The pipeline.
      state: From `Pipeline.init`, or restored; its arrays are donated.
      batches: Batches, or pairs of a batch and its weights. NumPy arrays are copied
        before the next is asked for. For a resumed run those that come after
        `state.step` steps.
      checkpoints: Where the state is saved: after each `save_every` steps of the whole
        run, and at the end.
      save_every: Number of steps between two checkpoints.

    Returns:
      The last state, and the metrics of every step; see `Metrics.combine`.

    Raises:
      TypeError: An argument is of another type.
      ValueError: `save_every` is less than 1.
      Exception: What `train_step` and `PipelineCheckpoints.save` raise; and what
        `batches` raises, which is then raised on all workers. All workers must have
        equally many batches.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim, pipeline
      >>> pipe = pipeline.Pipeline(
      ...     [pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))],
      ...     lambda y, batch: y**2,
      ...     pipeline.gpipe(1, 2),
      ...     optimizer=optim.sgd(lr=0.1),
      ... )
      >>> batches = [{"x": jnp.array([1.0, 2.0])}] * 3
      >>> state, found = pipeline.fit(pipe, pipe.init([jnp.array(3.0)]), batches)
      >>> state.step, round(pipeline.Metrics.combine(found).loss, 3)
      (3, 9.844)
    """
    check_type("fit(pipe)", pipe, Pipeline, "must be a Pipeline")
    with pipe.communicator.opened("fit") as channels:
        check_batches("fit", batches)
        check_saving(checkpoints, save_every, PipelineCheckpoints)
        check_state("fit(state)", state, PipelineState, "pipe")
        # Saving is a call of all workers, so they must do it at the same steps.
        saves = save_every if checkpoints is not None else 0
        channels.identify(CallArguments(settings={"save_every": saves}))
        supply = iter(batches)
        # `iter` may raise on one worker: after this all have an iterator, or all raise.
        channels.agree(None)
    return fitted(
        pipe.train_step,
        state,
        iter(partial(_next, supply, pipe), None),
        state.step,
        checkpoints=checkpoints,
        save_every=save_every,
    )


_END = object()


def _next(
    supply: Iterator[PyTree], pipe: Pipeline
) -> tuple[PyTree, ArrayLike | None] | None:
    """The next batch and its weights; None at the end, where all workers meet.

    An error in the data of one worker is an error of the step on all.
    """
    try:
        given = next(supply, _END)
        if given is not _END:
            return pair(given)
    except BaseException:
        # The other workers are in this call: a failure on entry reaches them all.
        with pipe.communicator.opened("train_step"):
            raise
    # A worker with more batches is in `train_step` instead: the calls do not match,
    # which raises on both.
    pipe.communicator.gather(None, "the end of fit")
    return None
