"""Rows of data parallelism: over devices, and on one device by `vmap`.

Shards are of unequal sizes, and one of them is empty.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist import data_parallel
from jdist._tree import PyTree, examples_in
from jdist.data_parallel import Join, Metrics, Sharded, TrainState, hooks
from jdist.matrix.row import Candidate, LossFn, Result, Row, devices, recorder

MIB = 2**20


def rows() -> dict[str, Row]:
    """Rows of methods, buckets, lossless hooks, training steps and Join."""
    by_gather = partial(_gradient, method="all_gather")
    # The error of a lossless hook is 0: feedback must not change its result.
    feedback = hooks.error_feedback(hooks.all_reduce())
    named: dict[str, Row] = {
        **{f"all_reduce x{n}": partial(_gradient, n) for n in (1, 2, 4, 8)},
        **{f"all_gather x{n}": partial(by_gather, n) for n in (2, 4)},
        "all_reduce x3 on one device": partial(_gradient, 3, shared=True),
        "all_gather x3 on one device": partial(by_gather, 3, shared=True),
        "all_reduce, each leaf alone x2": partial(_gradient, 2, bucket_cap_mb=0),
        "all_gather, buckets of 1 and 100 bytes x4": partial(
            by_gather, 4, bucket_cap_mb=(1 / MIB, 100 / MIB)
        ),
        "hook all_reduce x2": partial(_gradient, 2, hook=hooks.all_reduce()),
        "hook error_feedback x3 on one device": partial(
            _gradient, 3, shared=True, hook=feedback
        ),
        # Only before its start: later it approximates, and no bound of rounding holds.
        "hook power_sgd before its start x4": partial(
            _gradient, 4, hook=hooks.power_sgd()
        ),
        "train_step, accumulate 3 x3 on one device": partial(
            _train_step, 3, accumulate=3, shared=True
        ),
        "train_step, accumulate 2, zero x8": partial(
            _train_step, 8, accumulate=2, zero=True
        ),
        "train_step, zero, explicit axes x4": partial(
            _train_step, 4, accumulate=1, zero=True, explicit=True
        ),
        "Join x4": partial(_join, 4),
    }
    return {f"data_parallel {name}": row for name, row in named.items()}


def _gradient(
    count: int, loss_fn: LossFn, reduction: str, *, shared: bool = False, **options: Any
) -> Candidate:
    where = _replicas(count, shared)
    fn = data_parallel.value_and_grad(loss_fn, reduction=reduction, **where, **options)

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        return fn(params, *_shards(batch, weights, where, count))[:2]

    return candidate


def _train_step(
    count: int,
    loss_fn: LossFn,
    reduction: str,
    *,
    accumulate: int,
    shared: bool = False,
    zero: bool = False,
    explicit: bool = False,
) -> Candidate:
    """The gradient that a training step passes to its optimizer."""
    where = _replicas(count, shared, explicit)
    opt = data_parallel.zero(recorder(), **where) if zero else recorder()
    step = data_parallel.train_step(
        loss_fn, opt, reduction=reduction, accumulate=accumulate, **where
    )

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        shards = _shards(batch, weights, where, count, accumulate)
        return _recorded(*step(step.init(params), *shards))

    return candidate


def _join(count: int, loss_fn: LossFn, reduction: str) -> Candidate:
    """Replicas with one batch each, except the last, whose stream is empty."""
    where = _replicas(count)
    step = data_parallel.train_step(loss_fn, recorder(), reduction=reduction, **where)

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        sizes = _sizes(examples_in(batch, "candidate"), count)
        ends = np.cumsum(sizes)
        parts = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
        streams = [
            [jax.tree.map(lambda x, part=part: x[part], (batch, weights))]
            for part in parts[:-1]
        ]
        # A replica without a batch takes part with weight 0.
        joined = Join([*streams, []], rows=max(sizes), weighted=True, **where)
        (shards,) = joined
        return _recorded(*step(step.init(params), *shards))

    return candidate


def _recorded(state: TrainState, metrics: Metrics) -> Result:
    def is_sharded(x: object) -> bool:
        return isinstance(x, Sharded)

    # ZeRO pads and divides its state; the judge compares whole arrays.
    gradient = jax.tree.map(
        lambda x: x.whole() if is_sharded(x) else x, state.opt_state, is_leaf=is_sharded
    )
    return metrics.loss, gradient


def _replicas(
    count: int, shared: bool = False, explicit: bool = False
) -> dict[str, Any]:
    """The arguments for a mesh of `count` devices, or `count` replicas on one."""
    if shared:
        return {"replicas": count}
    kind = AxisType.Explicit if explicit else AxisType.Auto
    there = np.array(devices(count))
    return {"mesh": Mesh(there, ("data",), axis_types=(kind,))}


def _shards(
    batch: PyTree,
    weights: jax.Array | None,
    where: dict[str, Any],
    count: int,
    accumulate: int = 1,
) -> tuple[PyTree, jax.Array]:
    """The batch over the replicas, with rows for equal micro-batches."""
    sizes = _sizes(examples_in(batch, "candidate"), count)
    # A step takes equal micro-batches; the rows added have weight 0.
    rows = -(-max(sizes) // accumulate) * accumulate
    return data_parallel.shard_batch(
        batch, sizes=sizes, weights=weights, rows=rows, **where
    )


def _sizes(examples: int, replicas: int) -> tuple[int, ...]:
    """All sizes different, the last shard empty: 11 over 4 is (7, 3, 1, 0)."""
    # Odd numbers from the back, so that no two shards weigh the same.
    sizes = [0] * replicas
    for rank in range(replicas - 2, 0, -1):
        sizes[rank] = min(2 * (replicas - 2 - rank) + 1, examples - sum(sizes))
    sizes[0] = examples - sum(sizes)
    return tuple(sizes)
