"""The trees of stages on disk: a folder for each stage, and in it one for each step.

A step counts as saved once *all* stages of it are on disk. `save` returns then, and
only then deletes what is too old: whichever process is killed while it saves, the last
step that all stages have is there to resume from.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._checkpoint import (
    Checkpoints,
    Closing,
    StepFolder,
    check_keep,
    check_same,
    chosen,
    descriptions,
)
from jdist._errors import requirement
from jdist._fit import check_state
from jdist._tree import PyTree, named_leaves, unworded, words
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    Opened,
    StageChannels,
    receive,
)
from jdist.pipeline.run.update import PipelineState
from jdist.pipeline.stages.place import on_host, over_processes, processes_at


class Saved(NamedTuple):
    """Which stages there are, and which of them this process has to do with.

    Attributes:
      stages: How many the model has.
      own: Numbers of those whose trees are here.
      written: Those of them that this process writes. Each stage has one writer.
      opened: Begins a call that all processes make.
      writers: Of `jax.distributed`, the processes known to write.
      senders: By stage, the worker of the schedule that sends it to process 0 of
        `jax.distributed`, which writes all; empty where each process writes its own.
      writer: The worker that process 0 is, or is a part of.
      ranks: The workers that this process is, or is a part of.
    """

    stages: int
    own: Collection[int]
    written: Collection[int]
    opened: Opened
    writers: frozenset[int] = frozenset()
    senders: Sequence[int] = ()
    writer: int = 0
    ranks: Collection[int] = ()

    @classmethod
    def of(cls, pipe: Pipeline) -> "Saved":
        """Of a pipeline: the first worker of a stage writes it; of a mesh over several
        processes the one that has its first device."""
        places = pipe.communicator.places
        # Replicas of a stage are equal, bit for bit.
        first = [min(workers) for workers in pipe.schedule.placement]
        begins = {
            j: next(iter(processes_at(places.devices[worker])), None)
            for j, worker in enumerate(first)
        }
        here, own, opened = jax.process_index(), pipe.own, pipe.communicator.opened
        each = [processes_at(place) for place in places.devices]
        # orbax writes from process 0; a stage of its own can reach it by a message.
        if jax.process_count() > 1 and not pipe.communicator.sees_all and all(each):
            made = cls(len(first), own, range(len(first)) if here == 0 else (), opened)
            writer = next(rank for rank, some in enumerate(each) if 0 in some)
            return made._replace(senders=first, writer=writer, ranks=places.own)
        # Without a place of its own, or elsewhere than here, a worker is of rpc's.
        written = [
            j
            for j, worker in enumerate(first)
            if worker in places.own and begins[j] in (here, None)
        ]
        writers = {process for process in begins.values() if process is not None}
        writers |= {here} if written else set()
        return cls(len(pipe.stages), own, written, opened, frozenset(writers))


class StageCheckpoints(Closing):
    """Trees of stages, by the number of a step; every process calls every method.

    Args:
      folder: Made if it is not there. Workers may have one each, as long as each finds
        there what it has to read.
      saved: Which stages.
      keep: How many of the last steps that all stages have stay; None for all.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      ValueError: A process of `jax.distributed` other than 0 would have to write.
      WorkerLost, RpcTimeout: Not all processes came.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jdist.pipeline.run.stage_channels import alone
      >>> here = Saved(2, [0, 1], [0, 1], alone)
      >>> trees = {0: {"w": jnp.array([1.0, 2.0])}, 1: {"b": jnp.array(3)}}
      >>> with (
      ...     tempfile.TemporaryDirectory() as folder,
      ...     StageCheckpoints(folder, here) as checkpoints,
      ... ):
      ...     checkpoints.save(7, trees)
      ...     step, again = checkpoints.restore(trees)
      >>> step, int(again[1]["b"])
      (7, 3)
    """

    def __init__(
        self, folder: str | Path, saved: Saved, *, keep: int | None = 3
    ) -> None:
        """Opens the folder."""
        self._saved = saved
        self._keep = keep
        self._folders: dict[int, StepFolder] = {}
        try:
            with saved.opened("PipelineCheckpoints") as channels:
                check_keep("StageCheckpoints", keep)
                _check_writers(saved.writers)
                for j in {*saved.own, *saved.written}:
                    path = Path(folder) / f"stage{j}"
                    self._folders[j] = StepFolder(path, alone=True)
                self._complete = self._found(channels)
        # orbax's threads would outlive a constructor that raised.
        except BaseException:
            self.close()
            raise

    def steps(self) -> list[int]:
        """The steps that all stages have, in order."""
        return list(self._complete)

    def save(self, step: int, trees: Mapping[int, PyTree]) -> None:
        """Writes the trees of this process; returns when all stages' are on disk.

        Args:
          step: Later than all that were saved.
          trees: By the number of the stage.

        Raises:
          ValueError: It is not later.
          WorkerLost, RpcTimeout: Another worker did not save its stages.
        """
        with self._saved.opened("PipelineCheckpoints.save") as channels:
            channels.identify(step)
            if self._complete and step <= self._complete[-1]:
                last = self._complete[-1]
                rule = f"must come after the last step that was saved, {last}"
                remedy = "Go on from there, or use another folder."
                raise ValueError(requirement("save(step)", rule, step, remedy))
            channels.begin()
            for j in range(self._saved.stages):
                leaves: dict[str, PyTree] = {}
                if j in self._saved.own:
                    # Together: all processes that have some of an array gather it.
                    own = _leaves(trees[j])
                    leaves = {path: _gathered(x) for path, x in own.items()}
                leaves = self._at_writer(channels, j, leaves)
                if j in self._saved.written:
                    self._write(j, step, leaves)
            self._complete = self._found(channels)
        # Only now: until all stages have the new step, the older ones are needed.
        kept = self._complete if self._keep is None else self._complete[-self._keep :]
        for j in self._saved.written:
            self._delete(j, lambda other: other not in kept)
        self._complete = kept

    def restore(
        self, like: Mapping[int, PyTree], step: int | None = None
    ) -> tuple[int, dict[int, PyTree]]:
        """Reads trees.

        Args:
          like: Trees of the same structure, shapes and dtypes, by stage.
          step: Which; None for the latest that all stages have.

        Returns:
          The step and the trees, bit for bit, each leaf where it is in `like`.

        Raises:
          ValueError: There is no such step; or it was saved from other trees, and the
            message names the first path that differs.
        """
        with self._saved.opened("PipelineCheckpoints.restore") as channels:
            step = chosen("restore", self._complete, step)
            channels.identify(step)
            found = {j: self._read(j, step, tree) for j, tree in like.items()}
            channels.agree(None, found)
        return step, found

    def close(self) -> None:
        """Ends what orbax runs in the background."""
        for folder in self._folders.values():
            folder.close()

    def _write(self, stage: int, step: int, leaves: dict[str, PyTree]) -> None:
        description = {"stages": self._saved.stages, "leaves": descriptions(leaves)}
        arrays: dict[str, Any] = {
            path: words(jnp.asarray(x)) for path, x in leaves.items()
        }
        if jax.process_count() > 1:
            # orbax takes JAX's arrays for those of all processes.
            arrays = jax.tree.map(np.asarray, arrays)
        # Left by a run that ended before the other stages had that step.
        self._delete(stage, lambda other: other >= step)
        self._folders[stage].write(step, {"arrays": arrays}, description)

    def _at_writer(
        self, channels: StageChannels, stage: int, leaves: dict[str, PyTree]
    ) -> dict[str, PyTree]:
        """A stage's leaves, where they are written; elsewhere they may be empty."""
        saved = self._saved
        if not saved.senders:
            return leaves
        sender = saved.senders[stage]
        tag = MessageTag("C", -1, "", stage, sender)
        if sender in saved.ranks and sender != saved.writer:
            channels.put(tag, saved.writer, leaves)
        if saved.writer in saved.ranks and sender != saved.writer:
            leaves = receive(channels, tag, saved.writer, "a checkpoint")
        return leaves

    def _found(self, channels: StageChannels) -> list[int]:
        """The steps that all stages have, as their writers say; ends the call."""
        mine = [[j, self._folders[j].steps()] for j in self._saved.written]
        told = channels.agree(mine)
        there = [set(steps) for stages in told for _, steps in stages]
        return sorted(set.intersection(*there))

    def _delete(self, stage: int, old: Callable[[int], bool]) -> None:
        folder = self._folders[stage]
        for step in filter(old, folder.steps()):
            folder.delete(step)

    def _read(self, stage: int, step: int, like: PyTree) -> PyTree:
        folder, leaves = self._folders[stage], _leaves(like)
        description = folder.description(step)
        if description["stages"] != self._saved.stages:
            rule = f"must have the {description['stages']} stages that were saved"
            raise ValueError(requirement("restore(like=...)", rule, self._saved.stages))
        saved, where = description["leaves"], f"stage {stage}: "
        check_same("restore", saved, descriptions(leaves), where)
        wanted = {path: _on_host(leaf) for path, leaf in leaves.items()}
        found = folder.read(step, {"arrays": wanted})["arrays"]
        structure: Any = jax.tree.structure(like)
        return structure.unflatten(
            _placed(unworded(found[path], leaf), leaf) for path, leaf in leaves.items()
        )


class PipelineCheckpoints(Checkpoints[PipelineState]):
    """A folder of a pipeline's training states, one for each step that was saved.

    Every process writes the stages that run in it (of a stage with several workers, the
    first one) and reads them; they may be other processes than those that saved, and
    more or fewer, if the stages are the same and the folder is theirs in common. Use it
    as a context manager, or `close` it. Every process calls every method.

    Args:
      folder: Made if it is not there.
      pipe: The pipeline.
      keep: How many of the last checkpoints stay; None for all.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      WorkerLost, RpcTimeout: Not all workers of the pipeline came.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jdist import optim, pipeline
      >>> pipe = pipeline.Pipeline(
      ...     [pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))],
      ...     lambda y, batch: y,
      ...     pipeline.gpipe(1, 2),
      ...     optimizer=optim.sgd(lr=0.1),
      ... )
      >>> params, batch = [jnp.array(3.0)], {"x": jnp.array([1.0, 2.0])}
      >>> state, _ = pipe.train_step(pipe.init(params), batch)
      >>> with (
      ...     tempfile.TemporaryDirectory() as folder,
      ...     pipeline.PipelineCheckpoints(folder, pipe) as saved,
      ... ):
      ...     saved.save(state)
      ...     again = saved.restore(pipe.init(params))
      >>> again.step, float(again.params[0]) == float(state.params[0])
      (1, True)
    """

    def __init__(
        self, folder: str | Path, pipe: Pipeline, *, keep: int | None = 3
    ) -> None:
        """Opens the folder."""
        self._own = pipe.own
        self._checkpoints = StageCheckpoints(folder, Saved.of(pipe), keep=keep)

    def steps(self) -> list[int]:
        """The steps that all stages have, in order."""
        return self._checkpoints.steps()

    def save(self, state: PipelineState) -> None:
        """Writes the state under its step; returns when all stages are on disk.

        Raises: what `StageCheckpoints.save` raises.
        """
        check_state("save(state)", state, PipelineState, "pipe")
        self._checkpoints.save(state.step, _by_stage(state, self._own))

    def restore(self, like: PipelineState, step: int | None = None) -> PipelineState:
        """Reads a state.

        Args:
          like: A state of the same stages and optimizers, from `Pipeline.init`; its
            values do not matter.
          step: Which; None for the latest.

        Returns:
          The state, bit for bit; its arrays are where those of `like` are.

        Raises: what `StageCheckpoints.restore` raises.
        """
        check_state("restore(like=...)", like, PipelineState, "pipe")
        found, trees = self._checkpoints.restore(_by_stage(like, self._own), step)
        fields: dict[str, PyTree] = {"step": found}
        for name, value in _fields(like).items():
            if isinstance(value, list):
                there = range(len(value))
                fields[name] = [trees[j][name] if j in trees else None for j in there]
            else:
                fields[name] = trees[self._own[0]][name]
        return PipelineState(**fields)

    def close(self) -> None:
        """Ends what orbax runs in the background."""
        self._checkpoints.close()


def _fields(state: PipelineState) -> dict[str, PyTree]:
    """All but the step, which is the number that it is saved under."""
    return {name: x for name, x in state._asdict().items() if name != "step"}


def _by_stage(state: PipelineState, own: Collection[int]) -> dict[int, PyTree]:
    """The fields of each stage; those of all stages are saved with each of them."""
    return {
        j: {
            name: value[j] if isinstance(value, list) else value
            for name, value in _fields(state).items()
        }
        for j in own
    }


def _leaves(tree: PyTree) -> dict[str, PyTree]:
    return {path: x for path, x in named_leaves(tree).items() if x is not None}


def _check_writers(writers: Collection[int]) -> None:
    """Refuses what orbax would lose: it writes arrays of one process from process 0.

    Raises:
      ValueError: A process of `jax.distributed` other than 0 would have to write.
    """
    others = sorted({*writers} - {0})
    if jax.process_count() > 1 and others:
        rule = (
            "must have a device of process 0 first in the place of each stage, where "
        )
        rule += "`jax.distributed` runs: orbax writes from process 0"
        got = f"stages that begin in the processes {others}"
        remedy = "Lay out the mesh so that the axis of stages is within a process; or "
        remedy += "use rpc's workers without `jax.distributed`."
        raise ValueError(requirement("PipelineCheckpoints(pipe)", rule, got, remedy))


def _gathered(leaf: PyTree) -> PyTree:
    """The whole of an array that is over several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return on_host(leaf)
    return leaf


def _on_host(leaf: PyTree) -> np.ndarray:
    like = jax.eval_shape(lambda: words(jnp.asarray(leaf)))
    return np.empty(like.shape, like.dtype)


def _placed(found: PyTree, like: PyTree) -> PyTree:
    """On the device of `like`, if that was chosen: a place is part of a signature."""
    if isinstance(like, jax.Array) and not like.is_fully_addressable:
        return over_processes(found, like.sharding)
    # A copy, because steps donate, and NumPy's memory is not JAX's to give away.
    array = jnp.array(found)
    if isinstance(like, jax.Array) and like.committed:
        return jax.device_put(array, like.sharding)
    return array
