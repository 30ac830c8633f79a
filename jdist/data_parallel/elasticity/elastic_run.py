"""Elastic data parallelism: the arguments of a run, and what a worker does in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jdist import reduction as reductions
from jdist._checkpoint import check_folder
from jdist._errors import (
    check_at_least,
    check_function,
    check_number,
    check_positive_seconds,
    check_type,
    value_error,
)
from jdist._tree import (
    PyTree,
    check_arrays,
    described,
    examples_in,
    named_leaves,
    owned,
)
from jdist.data_parallel.data.sampler import Sampler
from jdist.data_parallel.elasticity.leader import RunTerms
from jdist.data_parallel.elasticity.replica_work import (
    Batches,
    Programs,
    ReplicaWork,
)
from jdist.data_parallel.replicas.shards import host_weights
from jdist.data_parallel.step.train_state import TrainState
from jdist.optim import Optimizer
from jdist.optim.internal import check_optimizer, loss_scaling, started


class Elastic:
    """Training that stays exact while replicas come and go.

    Replicas are the workers of an rpc group. Each step's batch is divided over the live
    ones. Examples that a replica has not computed when it dies go to others, and a step
    is taken when each of its examples has been counted once:

        dL/dW = sum_i (B_i / B) dL_i/dW              for any shards i

    A newcomer is sent the state of rank 0 while the others continue. If all but rank 0
    die, rank 0 continues alone. If rank 0 dies, whose process has the group's
    coordinator, the run ends; started again, it continues from the last checkpoint.

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`, one per example, `(examples,)`. It
        must treat examples independently.
      optimizer: The optimizer; one with masters must have no loss scale.
      sampler: The number of examples, and the order and size of the batches.
      reduction: "mean", "sum", "max" or "min".
      slots: None sums shards in whatever sizes they have. A number divides each batch
        into as many slots, each computed alone, and sums them along a fixed tree: on
        devices of one kind the parameters are then bit-equal for every history.
      folder: Folder of checkpoints, which all replicas read and write; None for none.
      save_every: Steps between checkpoints, which rank 0 writes; needs a folder. No
        replica returns before the one of the last step is complete.
      timeout: Seconds in which a replica must compute its share. A slower one is
        expelled, and readmitted with its next report. A timeout shorter than
        compilation costs repeated work.

    Raises:
      ValueError: An argument is out of its range; `save_every` without a folder.
      TypeError: An argument is of another type.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel, optim, rpc
      >>> training = data_parallel.Elastic(
      ...     lambda w, x: (x - w) ** 2,
      ...     optim.sgd(lr=0.1),
      ...     data_parallel.Sampler(examples=4, batch=2),
      ... )
      >>> data = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> with rpc.elastic_cluster():
      ...     state, losses = training.run(jnp.array(0.0), data)
      >>> len(losses), int(state.step)
      (2, 2)

    References:
      TorchElastic and torchft, which continue with the gradient of the remaining
      examples.
    """

    def __init__(
        self,
        loss_fn: Callable[[PyTree, PyTree], jax.Array],
        optimizer: Optimizer,
        sampler: Sampler,
        *,
        reduction: str = "mean",
        slots: int | None = None,
        folder: str | Path | None = None,
        save_every: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Checks the arguments; nothing is compiled yet."""
        call = "Elastic"
        check_function(f"{call}(loss_fn=...)", loss_fn)
        check_optimizer(f"{call}(optimizer=...)", optimizer)
        if loss_scaling(optimizer) is not None:
            rule = "must have no loss scale, which replicas do not multiply by"
            remedy = "Leave `loss_scale` out: bfloat16 needs none."
            raise value_error(f"{call}(optimizer=...)", rule, optimizer.name, remedy)
        check_type(f"{call}(sampler=...)", sampler, Sampler, "must be a Sampler")
        reductions.check_reduction(call, reduction)
        if slots is not None:
            rule = f"must be from 1 to the sampler's batch, {sampler.batch}"
            check_number(
                f"{call}(slots=...)",
                slots,
                rule,
                lambda n: 1 <= n <= sampler.batch,
                whole=True,
            )
        if folder is not None:
            check_folder(f"{call}(folder=...)", folder)
        if save_every is not None:
            argument = f"{call}(save_every=...)"
            check_at_least(argument, save_every, 1)
            if folder is None:
                rule = "must be None where there is no folder"
                remedy = "Give `folder=`, one that all replicas can reach."
                raise value_error(argument, rule, save_every, remedy)
        check_positive_seconds(f"{call}(timeout=...)", timeout)
        self._programs = Programs(loss_fn, optimizer, reduction)
        self._optimizer, self._sampler, self._reduction = optimizer, sampler, reduction
        self._slots = None if slots is None else int(slots)
        self._folder = None if folder is None else Path(folder).absolute()
        self._save_every = None if save_every is None else int(save_every)
        self._timeout = float(timeout)

    def run(
        self,
        params: PyTree,
        data: PyTree,
        weights: ArrayLike | None = None,
        *,
        epochs: int = 1,
        min_replicas: int = 1,
        join_timeout: float = 600.0,
        name: str = "elastic",
    ) -> tuple[TrainState, dict[int, float]]:
        """Takes part in a run as the current worker, until the run is over.

        Every worker of the group calls it, at any time and with the same arguments. It
        waits for the worker of rank 0, and for as many replicas as `min_replicas` says,
        but no longer than `join_timeout`.

        Args:
          params: Pytree of arrays: the first parameters, in full precision. A
            newcomer's are not used.
          data: Pytree of arrays, each `(examples, ...)`: all of it, on every worker.
          weights: `(examples,)`, non-negative; None for 1 each.
          epochs: Number of passes over the examples.
          min_replicas: Smallest number of replicas with which a step begins.
          join_timeout: Seconds that a step waits for them, and a replica for rank 0 to
            begin the run; after that the run ends with an error.
          name: Name of the run, unique in the group.

        Returns:
          The state after the last step, the same on every replica; and the loss of each
          step that this replica has applied. A newcomer lacks those before it came;
          rank 0 has all, unless the run continued from a checkpoint.

        Raises:
          TypeError: An argument is of another type.
          ValueError: An argument is wrong or differs from rank 0's; the run of that
            name has begun before, on this worker or rank 0.
          RpcError: This thread is no worker; the run is over on rank 0; rank 0 has left
            the run, or did not begin it in time; too few replicas came in time; the
            sums of a step could not be added up.
          WorkerLost: Rank 0 was lost. With a folder, another replica has then written
            a checkpoint of its last step.
        """
        # Imported on use: a program of one process does not need rpc.
        from jdist.data_parallel.elasticity.replica_group import follow_leader

        call, sampler = "Elastic.run", self._sampler
        check_type(f"{call}(name=...)", name, str, "must be a name, a str")
        check_at_least(f"{call}(epochs=...)", epochs, 1)
        check_at_least(f"{call}(min_replicas=...)", min_replicas, 1)
        check_positive_seconds(f"{call}(join_timeout=...)", join_timeout)
        examples = examples_in(data, f"{call}(data=...)")
        if examples != sampler.examples:
            rule = f"must have the sampler's {sampler.examples} examples"
            raise value_error(f"{call}(data=...)", rule, examples)
        check_arrays(f"{call}(params=...)", params)
        # As where replicas bring their own: that each batch has some is checked below.
        counted = host_weights(call, weights, examples, all_zero=True)
        batches = Batches(data, counted, sampler, self._slots)
        _check_batches(call, batches, int(epochs), self._reduction)
        terms = RunTerms(
            sampler.steps * int(epochs),
            batches.units,
            self._timeout,
            min_replicas=int(min_replicas),
            join_timeout=float(join_timeout),
        )

        def work(device: jax.Device | None) -> ReplicaWork:
            # Copies: the caller may donate its own.
            own = jax.tree.map(lambda x: jnp.array(x, copy=True), owned(params))
            step = jnp.zeros((), jnp.int32)
            first = TrainState(step, *started(self._optimizer, own))
            first = jax.device_put(first, device)
            return ReplicaWork(self._programs, batches, first, device, self._folder)

        agreed = self._agreed(params, batches, int(epochs))
        state, losses = follow_leader(name, terms, agreed, work, self._save_every)
        return state, {step: float(loss) for step, loss in sorted(losses.items())}

    def _agreed(self, params: PyTree, batches: Batches, epochs: int) -> dict[str, str]:
        """Settings, as text by name, on which all replicas must agree."""

        def shapes(tree: PyTree) -> str:
            leaves = named_leaves(tree).items()
            return str({path: described(jnp.asarray(leaf)) for path, leaf in leaves})

        return {
            "epochs": str(epochs),
            "reduction": self._reduction,
            "slots": str(self._slots),
            "order of examples": str(batches.sampler),
            # A digest, since every report carries these texts.
            "weights": hashlib.sha256(batches.weights.tobytes()).hexdigest()[:12],
            "shapes of parameters": shapes(params),
            "shapes of data": shapes(jax.tree.map(lambda x: x[:1], batches.data)),
            "optimizer": self._optimizer.name,
        }


def _check_batches(call: str, batches: Batches, epochs: int, reduction: str) -> None:
    """Checks that every batch has a positive weight: others have no mean or extreme."""
    # The usual case, without a look at every batch of the run.
    if reduction == "sum" or batches.weights.all():
        return
    for step in range(batches.sampler.steps * epochs):
        if not batches.weights[batches.rows(step)].any():
            rule = "must have a positive weight in every batch"
            got = f"none in that of step {step}"
            raise value_error(f"{call}(weights=...)", rule, got)
