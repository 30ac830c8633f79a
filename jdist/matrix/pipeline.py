"""Rows of pipelines: every family of schedules, over devices, workers and one program.

A loss without stages is divided by its parameters. Leaf k belongs to stage k modulo
the number of stages, and its cotangent crosses every stage between that one and the
loss, which the last stage computes:

    different stages         each but the last outputs its leaves beside those before
    equal stages             each adds its leaves to a value with zeros in their places
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jdist import pipeline, rpc
from jdist._errors import Unavailable
from jdist._tree import PyTree, examples_in, map_some, merge, split_inexact
from jdist.matrix.row import (
    Candidate,
    LossFn,
    Result,
    Row,
    devices,
    precision_of_caller,
    recorder,
)
from jdist.pipeline import OneProgram, Pipeline, Schedule, Stage, Workers

MICRO_BATCHES = 3

_ONE_STAGE = pipeline.one_f_one_b(1, MICRO_BATCHES)
_ON_MESHES = {
    "1F1B x2": pipeline.one_f_one_b(2, MICRO_BATCHES),
    # Takes micro-batches in rounds of as many as there are workers, hence 4.
    "interleaved x2": pipeline.interleaved(2, 4, 2),
    "ZB-H1 x2": pipeline.zero_bubble(2, MICRO_BATCHES),
    "GPipe x2": pipeline.gpipe(2, MICRO_BATCHES),
}
_LAYOUTS = {
    "PP": {"data": 1},
    "PP x DP": {"data": 2},
    "PP x TP": {"model": 2},
    "PP x DP x TP": {"data": 2, "model": 2},
}
"""Pipeline, data and tensor parallelism: the axes of each worker's mesh."""


def rows() -> dict[str, Row | Mapping[str, Row]]:
    """Rows of schedules over devices, meshes and workers, in one program; PipeDream."""
    m = MICRO_BATCHES
    one_f_one_b = pipeline.one_f_one_b(3, m)
    on_meshes = {
        f"on meshes, {schedule}, {layout}": partial(_over_meshes, made, axes)
        for schedule, made in _ON_MESHES.items()
        for layout, axes in _LAYOUTS.items()
    }
    # Each schedule and each layout once: a fault of either is found in a quarter of the
    # time that all combinations take.
    once = map(", ".join, zip(_ON_MESHES, _LAYOUTS, strict=True))
    named: dict[str, Row] = {
        "gpipe x3": partial(_over_devices, pipeline.gpipe(3, m)),
        "1F1B x3": partial(_over_devices, one_f_one_b),
        "1F1B on one device": partial(_over_devices, one_f_one_b, shared=True),
        "zero bubble x3": partial(_over_devices, pipeline.zero_bubble(3, m)),
        "interleaved x1": partial(_over_devices, pipeline.interleaved(1, m, 3)),
        "looped BFS x1": partial(_over_devices, pipeline.looped_bfs(1, m, 3)),
        "1F1B, recomputed x3": partial(_over_devices, one_f_one_b, recompute=True),
        "1F1B, three workers": partial(_over_workers, one_f_one_b),
        "ZBV x2": partial(_over_devices, pipeline.zbv(2, 4)),
        "V-Half x2": partial(_over_devices, pipeline.v_half(2, 4)),
        "V-Min x3": partial(_over_devices, pipeline.v_min(3, m)),
        "synthesized x3": _synthesized,
        "DualPipeV x2": partial(_over_devices, pipeline.dualpipe_v(2, 4)),
        "on a mesh, data x2": partial(_over_meshes, _ONE_STAGE, {"data": 2}),
        "on a mesh, model x2": partial(_over_meshes, _ONE_STAGE, {"model": 2}),
        **{key: on_meshes.pop(key) for key in map("on meshes, {}".format, once)},
        "PipeDream with a flush": _pipedream,
        "one program, 1F1B x2": partial(_one_program, pipeline.one_f_one_b(2, m)),
        "one program, ZBV x2": partial(_one_program, pipeline.zbv(2, m)),
    }
    more = {f"pipeline {name}": row for name, row in on_meshes.items()}
    return {
        **{f"pipeline {name}": row for name, row in named.items()},
        "pipeline on meshes, the other combinations": more,
    }


# --- different stages ---


def _over_devices(
    schedule: Schedule,
    loss_fn: LossFn,
    reduction: str,
    *,
    shared: bool = False,
    **options: Any,
) -> Candidate:
    """One device per worker, or JAX's default one; options are for the last stage."""
    where = None if shared else devices(schedule.workers)

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        stages = _stages(loss_fn, params, schedule.stages, **options)
        pipe = Pipeline(stages, _losses, schedule, where, reduction=reduction)
        placed = pipe.place(_shares(params, schedule.stages))
        loss, grads = pipe.value_and_grad(placed, {"batch": batch}, weights)
        return loss, _whole(grads, jax.tree.structure(params))

    return candidate


def _synthesized(loss_fn: LossFn, reduction: str) -> Candidate:
    """A schedule that a solver finds, with whole and split backward passes."""
    costs = pipeline.Costs(
        forward=[1, 2, 1], backward=[2, 4, 3], activation_bytes=[1.0, 1.0, 2.0]
    )
    found = pipeline.synthesize(
        costs, workers=3, micro_batches=MICRO_BATCHES, memory=[3, 3, 4]
    )
    return _over_devices(found.schedule, loss_fn, reduction)


def _over_meshes(
    schedule: Schedule, axes: Mapping[str, int], loss_fn: LossFn, reduction: str
) -> Candidate:
    """A mesh for each worker, whose model axis divides every leaf."""
    shape, parts = tuple(axes.values()), axes.get("model", 1)
    workers, stages = schedule.workers, schedule.stages
    found = np.array(devices(workers * math.prod(shape))).reshape(workers, *shape)
    places = [Mesh(own, tuple(axes)) for own in found]

    def spec(leaf: jax.Array) -> PartitionSpec:
        divided = leaf.ndim and "model" in axes
        return PartitionSpec("model") if divided else PartitionSpec()

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        def losses(padded: PyTree, batch: PyTree) -> jax.Array:
            return loss_fn(jax.tree.map(_without_padding, padded, params), batch)

        # The model axis must divide the rows of each leaf; the loss drops the padding.
        padded = jax.tree.map(lambda leaf: _with_padding(leaf, parts), params)
        made = _stages(losses, padded, stages)
        pipe = Pipeline(made, _losses, schedule, places, reduction=reduction)
        shares = _shares(padded, stages)
        placed = pipe.place(shares, jax.tree.map(spec, shares))
        loss, grads = pipe.value_and_grad(placed, {"batch": batch}, weights)
        own = _whole(grads, jax.tree.structure(params))
        return loss, map_some(_without_padding, own, params)

    return candidate


def _with_padding(leaf: jax.Array, parts: int) -> jax.Array:
    if not leaf.ndim:
        return leaf
    rows = [(0, 0)] * leaf.ndim
    rows[0] = 0, -len(leaf) % parts
    return jnp.pad(leaf, rows)


def _without_padding(found: jax.Array, leaf: jax.Array) -> jax.Array:
    """A gradient, or a padded leaf."""
    return found[: len(leaf)] if leaf.ndim else found


def _over_workers(schedule: Schedule, loss_fn: LossFn, reduction: str) -> Candidate:
    """A worker for each stage: threads of a local cluster."""
    names = [f"stage{number}" for number in range(schedule.workers)]

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        stages = _stages(loss_fn, params, schedule.stages)
        shares = _shares(params, schedule.stages)

        def on_worker(name: str) -> tuple[jax.Array, list[PyTree]]:
            # The workers of a local cluster share this process: each thread acts as
            # one.
            with rpc.use_worker(name):
                pipe = Pipeline(
                    stages, _losses, schedule, Workers(names), reduction=reduction
                )
                placed = pipe.place(shares)
                return pipe.value_and_grad(placed, {"batch": batch}, weights)

        with (
            precision_of_caller(),
            rpc.local_cluster(names),
            ThreadPoolExecutor(len(names)) as threads,
        ):
            # In parallel: the pass of each worker waits for its neighbours.
            found = list(threads.map(on_worker, names))
        # Each worker returns the gradients of its own stage, None for the others.
        own = [grads[number] for number, (_, grads) in enumerate(found)]
        return found[0][0], _whole(own, jax.tree.structure(params))

    return candidate


def _pipedream(loss_fn: LossFn, reduction: str) -> Candidate:
    """One update of all micro-batches; the gradient is the one the optimizer gets."""
    if reduction not in ("mean", "sum"):
        raise Unavailable(f"PipeDream updates by means or sums, not by {reduction}")

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        counts = np.asarray(weights, float)
        if reduction == "mean":
            # The total is known here. By itself an epoch begins each batch's backward
            # pass with shares of its own mean: it has not read the others yet.
            counts = counts / counts.sum()  # not in place: they are the judge's
        runtime = Pipeline(
            _stages(loss_fn, params, 3),
            _losses,
            # All micro-batches use one version of the weights: the gradient is the
            # batch's.
            pipeline.pipedream(3, 3, policy="flush", update_every=MICRO_BATCHES),
            optimizer=recorder(),
            reduction="sum",
        )
        rows = np.array_split(np.arange(examples_in(batch, "candidate")), MICRO_BATCHES)
        pairs = [
            ({"batch": jax.tree.map(lambda x, i=own: x[i], batch)}, counts[own])
            for own in rows
        ]
        state, metrics = runtime.train_epoch(runtime.init(_shares(params, 3)), pairs)
        return metrics.loss, _whole(state.opt_states, jax.tree.structure(params))

    return candidate


def _stages(loss_fn: LossFn, params: PyTree, count: int, **options: Any) -> list[Stage]:
    """Stages that output their leaves, and a last one that computes the losses."""
    structure = jax.tree.structure(params)

    def last(own: list[jax.Array], *given: PyTree) -> jax.Array:
        *before, batch = given
        leaves = [*(before[0] if before else []), own]
        return loss_fn(_whole(leaves, structure), batch)

    names = [f"leaves of stage {number}" for number in range(count - 1)]
    return [
        *(
            # The first has no stage before it.
            Stage(_put_out, (names[number - 1],) * bool(number), (name,))
            for number, name in enumerate(names)
        ),
        Stage(last, (*names[-1:], "batch"), ("losses",), **options),
    ]


def _put_out(
    own: list[jax.Array], *before: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    return [*(before[0] if before else []), own]


def _losses(losses: jax.Array, batch: PyTree) -> jax.Array:
    """Returns the losses, which the last stage has computed."""
    return losses


def _shares(params: PyTree, count: int) -> list[list[jax.Array]]:
    leaves = jax.tree.leaves(params)
    return [leaves[number::count] for number in range(count)]


def _whole(
    shares: Sequence[list[jax.Array]], structure: jax.tree_util.PyTreeDef
) -> PyTree:
    """Inverse of `_shares`."""
    leaves: list[Any] = [None] * sum(map(len, shares))
    for number, share in enumerate(shares):
        leaves[number :: len(shares)] = share
    return jax.tree.unflatten(structure, leaves)


# --- equal stages ---


def _one_program(schedule: Schedule, loss_fn: LossFn, reduction: str) -> Candidate:
    """Equal stages: each has all leaves, and a flag for each leaf that it adds."""
    mesh = Mesh(np.array(devices(schedule.workers)), ("stage",))
    count = schedule.stages
    stages = [Stage(_add, (f"h{j}",), (f"h{j + 1}",)) for j in range(count)]

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        floating, fixed = split_inexact(params)
        leaves, structure = jax.tree.flatten(floating)
        examples = examples_in(batch, "candidate")
        # Inputs of a pipeline have rows, hence a copy for each example.
        zeros = [np.zeros((examples, *x.shape), x.dtype) for x in leaves]
        owned = [
            {
                "leaves": leaves,
                # As data, since one program takes stages whose code is equal.
                "mine": [np.bool_(k % count == j) for k in range(len(leaves))],
            }
            for j in range(count)
        ]

        def losses(found: list[jax.Array], entries: PyTree) -> jax.Array:
            # The copies are equal: all examples pass the same stages.
            own = jax.tree.unflatten(structure, [copies[0] for copies in found])
            return loss_fn(merge(own, fixed), entries["batch"])

        places = OneProgram(mesh)
        pipe = Pipeline(stages, losses, schedule, places, reduction=reduction)
        entries = {"h0": zeros, "batch": batch}
        loss, grads = pipe.value_and_grad(pipe.place(owned), entries, weights)
        own = [grads[k % count]["leaves"][k] for k in range(len(leaves))]
        return loss, jax.tree.unflatten(structure, own)

    return candidate


def _add(own: PyTree, found: list[jax.Array]) -> list[jax.Array]:
    """Adds the leaves of a stage where the value has zeros."""
    return [
        value + jnp.where(mine, leaf, jnp.zeros_like(leaf))[None]
        for value, leaf, mine in zip(found, own["leaves"], own["mine"], strict=True)
    ]
