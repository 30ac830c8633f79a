"""Traces of every kind of trainer: shards, pipelines on devices and workers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist import pipeline, verify
from tests.verify.tracing.staged import (
    BATCH,
    PARAMS,
    WEIGHTS,
    losses,
    louder,
    piped,
    worker_step,
    wrong_worker_step,
)


@pytest.fixture(scope="module")
def judged():
    return verify.trace_judge(
        losses, PARAMS, BATCH, weights=WEIGHTS, finite_differences=False
    )


def sharded(params, batch, lost=False):
    """Data parallelism over three devices; without its sum of gradients, if `lost`."""
    mesh = Mesh(np.array(jax.devices("cpu")[:3]), ("data",))
    rows, same = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(same, rows, rows), out_specs=same,
        check_vma=False,
    )  # fmt: skip
    def run(params, batch, w):
        def total(params):
            return jnp.sum(w * losses(params, batch))

        loss, gradient = jax.value_and_grad(total)(params)
        if not lost:
            gradient = jax.lax.psum(gradient, "data")
        found = jax.lax.psum(loss, "data"), gradient
        return jax.tree.map(lambda x: x / jax.lax.psum(jnp.sum(w), "data"), found)

    return run(params, batch, jnp.asarray(WEIGHTS))


def partitioned(params, batch):
    """XLA's own partitioning of the whole batch."""
    mesh = Mesh(np.array(jax.devices("cpu")[:3]), ("data",))
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    mean = lambda p, b: jnp.sum(WEIGHTS * losses(p, b)) / WEIGHTS.sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(mean))(params, batch)


def on_devices(family, count=3):
    return piped(family(2, count), jax.devices("cpu")[:2])


def one_program():
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("stage",))
    return piped(pipeline.gpipe(2, 3), pipeline.OneProgram(mesh))


RIGHT = {
    "shards": lambda: sharded,
    "partitioned": lambda: partitioned,
    "1F1B, uneven micro-batches": lambda: piped(pipeline.one_f_one_b(2, 2)),
    "backward passes in halves": lambda: on_devices(pipeline.zero_bubble),
    "one program": one_program,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_trainers_of_every_kind_have_no_difference(judged, name):
    trace = judged(RIGHT[name]())
    assert trace.raise_if_failed().difference is None
    assert trace.notes == ()
    assert trace.right == (
        "forward stage[0]", "forward stage[1]",
        "backward stage[1]", "backward stage[0]",
    )  # fmt: skip


def test_a_pipeline_compiled_before_is_traced_and_runs_without_taps_again(judged):
    candidate = piped(pipeline.one_f_one_b(2, 2))
    candidate(PARAMS, BATCH)
    trace = judged(candidate)
    assert len(trace.right) == 4
    with verify.TapRecording() as recording:
        pass
    jax.block_until_ready(candidate(PARAMS, BATCH))
    assert recording.records == ()


def test_a_wrong_stage_is_named(judged):
    trace = judged(piped(pipeline.one_f_one_b(2, 2), second=louder))
    assert (trace.difference.direction, trace.difference.tap) == ("forward", "stage[1]")
    assert trace.difference.examples == tuple(range(9))
    assert trace.right == ("forward stage[0]",)


def test_a_lost_sum_over_shards_is_no_tap_s_fault(judged):
    trace = judged(partial(sharded, lost=True))
    assert trace.difference.direction == "gradient"
    assert trace.difference.examples == tuple(range(3, 9))
    assert "examples 3-5 count 0 times" in trace.difference.words
    assert len(trace.right) == 4


def on_workers(cluster, step):
    def candidate(params, batch):
        del params, batch  # The workers have the same.
        tasks = [cluster.start(rank, step) for rank in range(2)]
        found = [task.result() for task in tasks]
        for _, records in found:
            verify.replay(records)
        (loss, first), (_, second) = (result for result, _ in found)
        return loss, [first[0], second[1]]

    return candidate


def test_workers_records_are_brought_home(judged, cluster):
    trace = judged(on_workers(cluster, worker_step))
    assert trace.raise_if_failed().difference is None
    assert len(trace.right) == 4


def test_a_wrong_stage_on_a_worker_is_named(judged, threads):
    trace = judged(on_workers(threads, wrong_worker_step))
    assert (trace.difference.direction, trace.difference.tap) == ("forward", "stage[1]")
    assert trace.right == ("forward stage[0]",)
