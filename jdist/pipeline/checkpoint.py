"""Checkpoints of a pipeline: a folder for each stage, with one for each step in it.

A step counts as saved once *all* its stages are on disk. `save` returns then, and only
then deletes older steps: if a process is killed while it saves, the last complete step
is still there to resume from.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._checkpoint import (
    Checkpoints,
    StepFolder,
    check_after,
    check_folder,
    check_keep,
    check_same,
    chosen,
)
from jdist._errors import check_type, value_error
from jdist._tree import PyTree, check_state, descriptions, named_leaves, unworded, words
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.run.identity import CallArguments
from jdist.pipeline.run.stage_channels import MessageTag, StageChannels, receive
from jdist.pipeline.run.update import PipelineState
from jdist.pipeline.stages.place import on_host, over_processes, processes_at


class PipelineCheckpoints(Checkpoints[PipelineState]):
    """Checkpoints of a pipeline's training states, by step.

    Every process writes and reads the stages that run in it; a stage with several
    workers is written by the first one. A state may be restored by other processes, and
    by more or fewer, if the stages are the same and all processes share the folder. Use
    it as a context manager, or `close` it. Every process calls every method.

    Args:
      folder: Created if it does not exist.
      pipe: The pipeline.
      keep: Number of the last checkpoints to keep; None for all.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      ValueError: A process of `jax.distributed` other than 0 would have to write.
      WorkerLost, RpcTimeout: A worker of the pipeline did not make the call.

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
        """Open the folder."""
        check_type("PipelineCheckpoints(pipe)", pipe, Pipeline, "must be a Pipeline")
        check_folder("PipelineCheckpoints(folder)", folder)
        communicator = pipe.communicator
        self._opened, self._places = communicator.opened, communicator.places
        self._own, self._keep = pipe.own, keep
        # Replicas of a stage are equal, bit for bit: its first worker is enough.
        self._senders = [min(workers) for workers in pipe.schedule.placement]
        each = [processes_at(place) for place in self._places.devices]
        # orbax writes from process 0 alone: stages in one process each are sent there.
        apart = jax.process_count() > 1 and not communicator.sees_all
        self._is_sent = apart and all(each)
        # The worker to which process 0 belongs.
        self._writer = next((rank for rank, some in enumerate(each) if 0 in some), 0)
        # If the first worker of a stage has a mesh over several processes, the one with
        # the mesh's first device writes. A worker without a device is one of rpc, and
        # writes in its own process.
        here, own = jax.process_index(), self._places.own
        begins = [
            next(iter(each[worker]), here if worker in own else None)
            for worker in self._senders
        ]
        writers = [0 if self._is_sent else begin for begin in begins]
        self._written = [j for j, writer in enumerate(writers) if writer == here]
        self._folders: dict[int, StepFolder] = {}
        try:
            with self._opened("PipelineCheckpoints") as channels:
                check_keep("PipelineCheckpoints", keep)
                _check_writers(sorted({writer for writer in writers if writer}))
                # Also stages of others, if this process writes them.
                for j in {*self._own, *self._written}:
                    path = Path(folder) / f"stage{j}"
                    self._folders[j] = StepFolder(path, alone=True)
                self._complete = self._found(channels)
        # orbax has started threads, which would outlive a constructor that raised.
        except BaseException:
            self.close()
            raise

    def steps(self) -> list[int]:
        """The steps that all stages have, in order."""
        return list(self._complete)

    def save(self, state: PipelineState) -> None:
        """Write the state under its step; returns when all stages are on disk.

        Raises:
          ValueError: The step is not above those that were saved.
          WorkerLost, RpcTimeout: Another worker did not save its stages.
        """
        check_state("save(state)", state, PipelineState, "pipe")
        step = state.step
        with self._opened("PipelineCheckpoints.save") as channels:
            channels.identify(CallArguments(step))
            check_after("save(step)", self._complete, step)
            channels.begin()
            # All stages in one order, not only own ones: the gathers below are
            # collectives, and the writer receives stages one by one.
            for j in range(len(self._senders)):
                leaves: dict[str, PyTree] = {}
                if j in self._own:
                    # A collective of all processes that have a part of the array.
                    own = _leaves(_of_stage(state, j))
                    leaves = {path: _gathered(x) for path, x in own.items()}
                if self._is_sent:
                    leaves = self._at_writer(channels, j, leaves)
                if j in self._written:
                    self._write(j, step, leaves)
            self._complete = self._found(channels)
        # After the agreement: until all stages have the new step, the older ones are
        # needed to resume from.
        kept = self._complete if self._keep is None else self._complete[-self._keep :]
        for j in self._written:
            self._delete(j, lambda other: other not in kept)
        self._complete = kept

    def restore(self, like: PipelineState, step: int | None = None) -> PipelineState:
        """Read a state.

        Args:
          like: A state of the same stages and optimizers, from `Pipeline.init`; its
            values do not matter.
          step: Number of the step; None for the latest that all stages have.

        Returns:
          The state, bit for bit; its arrays are on the devices of those in `like`.

        Raises:
          ValueError: There is no such step; or it was saved from other trees, and the
            message names the first path that differs.
        """
        check_state("restore(like=...)", like, PipelineState, "pipe")
        with self._opened("PipelineCheckpoints.restore") as channels:
            # More stages than were saved: the last of them have no step at all.
            if not self._complete:
                for folder in self._folders.values():
                    for other in folder.steps():
                        self._check_stages(folder.description(other))
            step = chosen("restore", self._complete, step)
            channels.identify(CallArguments(step))
            trees = {j: self._read(j, step, _of_stage(like, j)) for j in self._own}
            # Returns once all processes have read: an error of one is raised on all.
            channels.agree(None, trees)
        fields: dict[str, PyTree] = {"step": step}
        for name, value in _fields(like).items():
            if isinstance(value, list):
                there = range(len(value))
                fields[name] = [trees[j][name] if j in trees else None for j in there]
            else:
                # Saved with every stage, and equal in all.
                fields[name] = trees[self._own[0]][name]
        return PipelineState(**fields)

    def close(self) -> None:
        """Stop orbax's background threads."""
        for folder in self._folders.values():
            folder.close()

    def _write(self, stage: int, step: int, leaves: dict[str, PyTree]) -> None:
        description = {"stages": len(self._senders), "leaves": descriptions(leaves)}
        arrays: dict[str, Any] = {
            path: words(jnp.asarray(x)) for path, x in leaves.items()
        }
        if jax.process_count() > 1:
            # orbax treats a JAX array as one of all processes, but these are local.
            arrays = jax.tree.map(np.asarray, arrays)
        # Steps left by a run that ended before the other stages had them.
        self._delete(stage, lambda other: other >= step)
        self._folders[stage].write(step, {"arrays": arrays}, description)

    def _at_writer(
        self, channels: StageChannels, stage: int, leaves: dict[str, PyTree]
    ) -> dict[str, PyTree]:
        """The leaves of a stage at its writer; elsewhere they may be empty."""
        sender, ranks = self._senders[stage], self._places.own
        if sender == self._writer:
            return leaves
        tag = MessageTag("C", -1, "", stage, sender)
        if sender in ranks:
            channels.put(tag, self._writer, leaves)
        if self._writer in ranks:
            leaves = receive(channels, tag, self._writer, "a checkpoint")
        return leaves

    def _found(self, channels: StageChannels) -> list[int]:
        """Agree on the steps that all stages have; ends the call."""
        mine = [[j, self._folders[j].steps()] for j in self._written]
        told = channels.agree(mine)
        # A step that some stage lacks was interrupted while it was saved.
        there = [set(steps) for stages in told for _, steps in stages]
        return sorted(set.intersection(*there))

    def _check_stages(self, description: Mapping[str, Any]) -> None:
        """Raises ValueError if a step was saved with another number of stages."""
        if description["stages"] != len(self._senders):
            rule = f"must have the {description['stages']} stages that were saved"
            got = f"{len(self._senders)} stages"
            raise value_error("restore(like=...)", rule, got, _RECUT)

    def _delete(self, stage: int, old: Callable[[int], bool]) -> None:
        folder = self._folders[stage]
        for step in filter(old, folder.steps()):
            folder.delete(step)

    def _read(self, stage: int, step: int, like: PyTree) -> PyTree:
        folder, leaves = self._folders[stage], _leaves(like)
        description = folder.description(step)
        # Before the leaves: models cut into other stages may have equal trees in one.
        self._check_stages(description)
        saved, where = description["leaves"], f"stage {stage}: "
        check_same("restore", saved, descriptions(leaves), where)
        wanted = {path: _on_host(leaf) for path, leaf in leaves.items()}
        found = folder.read(step, {"arrays": wanted})["arrays"]
        structure: Any = jax.tree.structure(like)
        return structure.unflatten(
            _placed(unworded(found[path], leaf), leaf) for path, leaf in leaves.items()
        )


def _fields(state: PipelineState) -> dict[str, PyTree]:
    """The fields of a state without the step, under whose number it is saved."""
    return {name: x for name, x in state._asdict().items() if name != "step"}


def _of_stage(state: PipelineState, stage: int) -> dict[str, PyTree]:
    """The fields of a state for one stage."""
    # Fields of all stages, such as the key, are saved with each stage, so that a
    # process needs the files of its own stages alone.
    return {
        name: value[stage] if isinstance(value, list) else value
        for name, value in _fields(state).items()
    }


def _leaves(tree: PyTree) -> dict[str, PyTree]:
    return {path: x for path, x in named_leaves(tree).items() if x is not None}


_RECUT = (
    "Restore with a pipeline `old` of the saved stages, and group its layers anew: "
    "`saved = PipelineCheckpoints(folder, old).restore(old.init(old_params))`, then "
    "`state = pipe.init(regrouped(saved.params))`; likewise `opt_states` and `step`. "
    "The recipes in the documentation have the whole program."
)
"""What to do with a checkpoint of another number of stages."""


def _check_writers(others: Sequence[int]) -> None:
    """Refuse writers other than process 0, whose arrays orbax would not write.

    Raises:
      ValueError: A process of `jax.distributed` other than 0 would have to write.
    """
    if jax.process_count() > 1 and others:
        rule = (
            "must have a device of process 0 first in the place of each stage, where "
        )
        rule += "`jax.distributed` runs: orbax writes from process 0"
        got = f"stages that begin in the processes {others}"
        remedy = "Lay out the mesh so that the axis of stages is within a process; or "
        remedy += "use rpc's workers without `jax.distributed`."
        raise value_error("PipelineCheckpoints(pipe)", rule, got, remedy)


def _gathered(leaf: PyTree) -> PyTree:
    """The whole of an array that is sharded over several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return on_host(leaf)
    return leaf


def _on_host(leaf: PyTree) -> np.ndarray:
    # Evaluated abstractly: only the shape and the dtype are needed.
    like = jax.eval_shape(lambda: words(jnp.asarray(leaf)))
    return np.empty(like.shape, like.dtype)


def _placed(found: PyTree, like: PyTree) -> PyTree:
    """An array that was read, on the devices of `like`."""
    if isinstance(like, jax.Array) and not like.is_fully_addressable:
        return over_processes(found, like.sharding)
    # A copy, because steps donate their arguments, and on CPU an array may share memory
    # that belongs to NumPy.
    array = jnp.array(found)
    # Committed only if `like` is: jit compiles once more for another placement.
    if isinstance(like, jax.Array) and like.committed:
        return jax.device_put(array, like.sharding)
    return array
