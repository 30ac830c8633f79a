"""Training over many batches: a step for each, saved now and then, with a bar."""

import contextlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jdist._errors import requirement
from jdist.pipeline.checkpoint import Checkpoints
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.training import Metrics, PipelineState


def fit(
    pipe: Pipeline,
    state: PipelineState,
    batches: Iterable[Any],
    *,
    total: int | None = None,
    checkpoints: Checkpoints | None = None,
    save_every: int = 1000,
    console: Console | None = None,
) -> tuple[PipelineState, list[Metrics]]:
    """Trains on one batch after the other.

    Every process of the pipeline calls it with the same batches.

    Args:
      pipe: The pipeline.
      state: From `Pipeline.init`, or restored; its arrays are donated.
      batches: Batches, or pairs of a batch and its weights. For a resumed run those
        that come after `state.step` steps.
      total: How many there are, if they do not say it themselves.
      checkpoints: Where the state is saved: after each `save_every` steps of the whole
        run, and at the end.
      save_every: See there.
      console: Where a bar shows the step and its loss; None for none. Of several
        processes one should show it.

    Returns:
      The last state, and the metrics of every step; see `over_epoch`.

    Raises:
      ValueError: `save_every` is less than 1.
      Exception: What `train_step` and `Checkpoints.save` raise; and what `batches`
        raises, which is then raised on all workers. They must end alike, too.

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
      >>> state.step, round(pipeline.over_epoch(found).loss, 3)
      (3, 9.844)
    """
    with pipe.executor.opened("fit") as post:
        if save_every < 1:
            call = "fit(save_every=...)"
            raise ValueError(requirement(call, "must be 1 at least", save_every))
        saves = save_every if checkpoints is not None else 0
        post.identify(None, {"save_every": saves})
        if total is None and isinstance(batches, Sized):
            total = len(batches)
        supply = iter(batches)
        post.agree(None)
    metrics: list[Metrics] = []
    with _bar(console, total) as bar:
        while (given := _next(supply, pipe)) is not None:
            batch, weights = given
            state, found = pipe.train_step(state, batch, weights)
            # The loss before: that of this step may still be computed.
            bar.advance(state.step, metrics[-1] if metrics else None)
            metrics.append(found)
            if checkpoints is not None and state.step % save_every == 0:
                checkpoints.save(state)
    if checkpoints is not None and metrics and state.step % save_every:
        checkpoints.save(state)
    return state, metrics


_END = object()


def _next(supply: Iterator[Any], pipe: Pipeline) -> tuple[Any, Any] | None:
    """The next batch and its weights; None at the end, to which all workers come.

    What goes wrong with the data of one worker is an error of the step on all.
    """
    try:
        given = next(supply, _END)
        if given is not _END:
            return _pair(given)
    except BaseException:
        with pipe.executor.opened("train_step"):
            raise
    pipe.executor.gather(None, "the end of fit")
    return None


def _pair(given: Any) -> tuple[Any, Any]:
    batch, weights = given if isinstance(given, tuple) else (given, None)
    return batch, weights


class _Bar:
    """A bar of rich's, or none."""

    def __init__(self, shown: Progress | None, total: int | None) -> None:
        self._shown = shown
        if shown is not None:
            self._task = shown.add_task("training", total=total, loss="")

    def advance(self, step: int, before: Metrics | None) -> None:
        """Another step is done."""
        if self._shown is not None:
            loss = "" if before is None else f"loss {float(before.loss):.4g}"
            text = f"step {step}"
            self._shown.update(self._task, advance=1, description=text, loss=loss)


@contextlib.contextmanager
def _bar(console: Console | None, total: int | None) -> Iterator[_Bar]:
    if console is None:
        yield _Bar(None, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as shown:
        yield _Bar(shown, total)
