"""Uneven inputs: replicas that run out of data before others, without a deadlock.

All replicas run one program, so that a replica without a batch still takes part, with
rows of weight 0 (which repeat an example, see `jdist.data_parallel.replicas.shards`).
The divisor of the others' gradient is a choice. With B_i the total weight of replica
i's batch, g_i the gradient of its mean, A the replicas with data and K all replicas:

    divide_by     gradient                       weights of replica i's examples
    "weight"      sum_A (B_i / sum_A B) g_i      w            the whole batch's gradient
    "active"      sum_A g_i / |A|                w / B_i
    "initial"     sum_A g_i / K                  w / (B_i K), added up and not averaged

The last two are PyTorch's `join`, with `divide_by_initial_world_size` False and True.
"initial" gives 3/4 of the right gradient when one of four replicas has ended, and both
weigh a small batch like a large one. They exist to reproduce runs made with them.
"""

from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jdist._errors import JdistError, check_choice, value_error
from jdist._tree import PyTree, examples_in, owned
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import (
    BoundWeights,
    sharded,
)

DIVISORS = {"weight": "mean", "active": "mean", "initial": "sum"}
"""Each way to divide, and the `reduction` of the training step that goes with it."""


class EarlyEnd(JdistError):
    """A replica ran out of data while others had more; raised on every process."""


class Join:
    """Batches of all replicas, step by step, until all streams have ended.

    Iterate over it once: each step is `(batch, weights)` as from `shard_batch`, for
    `train_step(..., reduction=joined.reduction)`. Except with "weight", a step of
    another reduction refuses the weights, since its divisor would be another one.

    Args:
      streams: For each replica of this process, in the order of the mesh, an iterable
        of its batches: pytrees of arrays `(examples, ...)`.
      mesh: The devices.
      replicas: In place of a mesh: a number of replicas that share one device.
      rows: Rows per replica: the largest batch there is.
      divide_by: "weight": each example counts the same, as in the whole batch. "active"
        and "initial": the mean of the replicas' gradients, over those that have data or
        over all, as torch divides.
      weighted: Whether the streams hold pairs `(batch, weights)`.
      early_end: "wait" continues until all have ended; "error" raises as soon as some
        have ended and others have not.
      data_axis: The mesh axis that counts replicas.

    Attributes:
      reduction: The reduction that the training step must be built with: "mean" or
        "sum".

    Raises:
      ValueError: An option is unknown; there is not one stream per replica. While
        iterating: a batch has no examples or more than `rows`; a process has no batch
        at all.
      EarlyEnd: While iterating, with `early_end="error"`.

    Example:
      >>> import numpy as np
      >>> streams = [[np.array([1.0, 2.0]), np.array([3.0])], [np.array([4.0])]]
      >>> for batch, weights in Join(streams, replicas=2, rows=2):
      ...     print(batch, weights)
      [1. 2. 4. 4.] [1. 1. 1. 0.]
      [3. 3. 3. 3.] [1. 0. 0. 0.]

    References:
      `torch.distributed.algorithms.Join`; pytorch/pytorch#38174, whose criterion is
      "the gradient by running the entire global batch locally": ours by "weight".
    """

    def __init__(
        self,
        streams: Sequence[Iterable[PyTree]],
        mesh: Mesh | None = None,
        *,
        replicas: int | None = None,
        rows: int,
        divide_by: str = "weight",
        weighted: bool = False,
        early_end: str = "wait",
        data_axis: str = "data",
    ) -> None:
        """Checks the arguments; nothing is read yet."""
        check_choice("Join(divide_by=...)", divide_by, DIVISORS)
        check_choice("Join(early_end=...)", early_end, ("wait", "error"))
        self._placement = Placement.of("Join", mesh, replicas, data_axis)
        self._own = self._placement.own()
        if len(streams) != len(self._own):
            rule = (
                f"must have one stream for each of the {len(self._own)} replicas here"
            )
            raise value_error("Join(streams=...)", rule, len(streams))
        self._streams = [iter(stream) for stream in streams]
        self._rows, self._divide_by, self._weighted = rows, divide_by, weighted
        self._raises = early_end == "error"
        self.reduction = DIVISORS[divide_by]

    def __iter__(self) -> Iterator[tuple[PyTree, jax.Array | BoundWeights]]:
        """The steps."""
        spare: PyTree = None
        step = 0
        while True:
            items = [self._next(stream) for stream in self._streams]
            # Every process takes part at every step, since this is a collective; so all
            # end at the same one.
            active = self._agreed([item is not None for item in items])
            if not active.any():
                return
            if self._raises and not active.all():
                ended = ", ".join(map(str, np.flatnonzero(~active)))
                raise EarlyEnd(
                    f"replicas {ended} of {len(active)} ran out of data after {step} "
                    f"batches; the others have more"
                )
            yield self._joined(items, spare)
            here = next((item for item in items if item is not None), None)
            # The source of an example to repeat once this process has no batch left.
            spare = spare if here is None else here
            step += 1

    def _next(self, stream: Iterator[PyTree]) -> tuple[PyTree, np.ndarray] | None:
        item = next(stream, None)
        if item is None:
            return None
        # At once: streams may share a buffer, and the last batch is read again later.
        item = owned(item)
        batch, weights = item if self._weighted else (item, None)
        count = examples_in(batch, "Join(streams=...)")
        if not count:
            rule = "must hold batches of one example or more"
            raise value_error("Join(streams=...)", rule, "an empty batch")
        own = np.ones(count, np.float32) if weights is None else np.asarray(weights)
        # In float64, since every weight is divided by it.
        total = own.sum(dtype=np.float64)
        if self._divide_by != "weight" and total > 0:
            share = total * (
                self._placement.count if self._divide_by == "initial" else 1
            )
            own = own.astype(np.float64) / share
        return batch, own

    def _joined(
        self, items: Sequence[PyTree], spare: PyTree
    ) -> tuple[PyTree, jax.Array | BoundWeights]:
        """One batch of all replicas; `spare` is an earlier batch of this process."""
        given = [item for item in items if item is not None]
        sizes = [0 if item is None else len(item[1]) for item in items]
        if not given:
            if spare is None:
                rule = "must hold at least one batch in every process"
                raise value_error("Join(streams=...)", rule, "none here")
            # `shard_batch` pads with real examples, so it needs at least one.
            batch, weights = jax.tree.map(lambda x: x[:1], spare)
            given, sizes[0] = [(batch, np.zeros_like(weights))], 1
        # Joined, since `shard_batch` takes the examples of this process in one batch.
        batch, weights = jax.tree.map(lambda *parts: np.concatenate(parts), *given)
        batch, weights = sharded(batch, self._placement, sizes, weights, self._rows)
        if self._divide_by == "weight":  # Right for any reduction.
            return batch, weights
        return batch, BoundWeights(weights, self.reduction)

    def _agreed(self, here: Sequence[bool]) -> np.ndarray:
        """Whether each replica has a batch, the same array in every process."""
        active = np.zeros(self._placement.count, bool)
        active[self._own] = here
        if len(self._own) == self._placement.count:
            return active  # All replicas are in this process.
        return np.any(multihost_utils.process_allgather(active), axis=0)
