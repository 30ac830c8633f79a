"""torch's DistributedDataParallel: two processes over gloo, each with its own shard."""

import functools
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.strangers import torch_ddp_worker, torch_model
from experiments.strangers.problem import Step
from experiments.strangers.stranger import Use

RANKS = 2
DEADLINE = 120.0
"""Seconds within which both processes must have taken a step."""

# --- the trainer, as its documentation has it: torch_ddp_worker.py ---


class Group:
    """Processes that take one step after another, until this process ends."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        # A file lets the processes meet without a port.
        self.folder = tempfile.TemporaryDirectory(prefix="strangers-")
        store = str(Path(self.folder.name) / "store")
        pipes = [spawn.Pipe() for _ in range(RANKS)]
        self.connections = [own for own, _ in pipes]
        # Daemons end with this process, even if it fails.
        self.processes = [
            spawn.Process(
                target=torch_ddp_worker.serve,
                args=(theirs, store, r, RANKS),
                daemon=True,
            )
            for r, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            # While this end is open, the death of a process would not close its pipe.
            theirs.close()

    def trained(self, step: Step, way: str) -> Any:
        """The gradient of the first process after one step.

        Args:
          step: The data, with a part for each process.
          way: As in `torch_ddp_worker.trained`.

        Raises:
          RuntimeError: A process ended, or did not answer within `DEADLINE`.
        """
        for connection, part in zip(self.connections, step.parts, strict=True):
            connection.send((way, step.params, part))
        try:
            first, *_ = [self._answer(own) for own in self.connections]
        except RuntimeError:
            for process in self.processes:
                process.kill()
            raise
        return first

    def _answer(self, connection: Any) -> Any:
        if not connection.poll(DEADLINE):
            raise RuntimeError(f"torch's DDP took no step within {DEADLINE:.0f} s")
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            text = "a process of torch's DDP ended; its own error stands above"
            raise RuntimeError(text) from None


# Started once: starting processes takes ten times longer than all steps.
@functools.cache
def group() -> Group:
    """The only group of this process."""
    return Group()


# --- what the judge needs ---

NAMES = torch_model.NAMES

# --- what is on trial ---


def shards(step: Step) -> Step:
    """A part for each process; the first is larger if the parts cannot be equal."""
    return replace(step, sizes=_sizes(step), count=RANKS)


def _sizes(step: Step) -> tuple[int, ...]:
    """The sizes of the parts; the first has two sequences more in "small last"."""
    count = len(step.whole.inputs)
    if step.setting == "short end":
        # The second process has run out of data.
        return (count, 0)
    more = 1 if step.setting == "small last" else 0
    return (count // 2 + more, count - count // 2 - more)


REFERENCE = (
    "https://docs.pytorch.org/docs/stable/generated/"
    "torch.nn.parallel.DistributedDataParallel.html"
)
ENDS = "without Join the other process waits for ever"


def _use(way: str, told: str, claim: str, documented: str, **options: Any) -> Use:
    def show(step: Step) -> Any:
        return group().trained(step, way)

    return Use(
        "torch DDP", told, claim, show, "gradient", documented, REFERENCE,
        names=NAMES, parts=shards, **options,
    )  # fmt: skip


CLAIM = "the mean over all shards' tokens"
INITIAL = (
    "Each sample has the same weight over all steps: the remaining processes take "
    "smaller steps on purpose."
)
ACTIVE = "Divides by the remaining processes, whose samples then weigh more."

USES: Sequence[Use] = (
    _use(
        "mean",
        "mean losses on each process",
        CLAIM,
        "Gradients are averaged over the processes; nothing on unequal shards.",
        lacks={"short end": ENDS},
    ),
    _use("join initial", "Join, divided by the initial number", CLAIM, INITIAL),
    _use("join active", "Join, divided by the active number", CLAIM, ACTIVE),
    _use(
        "tokens",
        "losses over all processes' tokens, times the processes",
        CLAIM,
        "Gradients are averaged; the loss has to undo it.",
        lacks={"short end": ENDS},
        remedy=True,
    ),
)
