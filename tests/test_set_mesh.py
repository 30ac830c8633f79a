"""`jax.set_mesh` changes no bit of checkpoints, of calls or of gradients over workers.

tests/data_parallel/test_set_mesh.py and tests/pipeline have training.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jdist import autograd, data_parallel, optim, pipeline, rpc

ROWS, INPUTS, OUTPUTS = 6, 5, 3


@pytest.fixture
def given(rng):
    """A matrix, a vector and a batch."""
    shapes = (INPUTS, OUTPUTS), (OUTPUTS,), (ROWS, INPUTS)
    return [np.float32(rng.normal(size=shape)) for shape in shapes]


def of_replicas(folder, matrix, vector, x):
    """A step, a checkpoint, and a step of what was restored."""

    def losses(params, x):
        return jnp.sin(jnp.tanh(x @ params["a"]) @ params["b"])

    mesh = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3])
    step = data_parallel.train_step(losses, optim.adam(lr=0.1), mesh)
    params = {"a": matrix, "b": vector}
    state, _ = step(step.init(params), x)
    checkpoints = data_parallel.TrainCheckpoints(folder)
    checkpoints.save(state)
    return step(checkpoints.restore(step.init(params)), x)


def of_a_pipeline(folder, matrix, vector, x):
    """The same for two stages."""
    stages = [
        pipeline.Stage(lambda p, x: jnp.tanh(x @ p)),
        pipeline.Stage(lambda p, h: h @ p, inputs=("h",), outputs=("y",)),
    ]
    pipe = pipeline.Pipeline(
        stages,
        lambda outputs, batch: jnp.sin(outputs),
        pipeline.gpipe(2, 2),
        jax.devices()[:2],
        optimizer=optim.adam(lr=0.1),
    )
    state, _ = pipe.train_step(pipe.init([matrix, vector]), {"x": x})
    checkpoints = pipeline.PipelineCheckpoints(folder, pipe)
    checkpoints.save(state)
    restored = checkpoints.restore(pipe.init([matrix, vector]))
    state, metrics = pipe.train_step(restored, {"x": x})
    return state.params, metrics.loss


def product(a, b):
    return jnp.tanh(a @ b)


def over_workers(_, matrix, vector, x):
    """A call, a backward pass, an optimizer's step, and a call that JAX derives."""
    with rpc.local_cluster(["w0", "w1"], allow=(__name__,)), rpc.use_worker("w0"):
        leaf, other = autograd.variable(x), autograd.variable(matrix)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("w1", product, args=(leaf, other))
            loss = autograd.apply(lambda y: (y * y).sum(), y)
            autograd.backward(context_id, [loss])
            found = dict(autograd.get_gradients(context_id))
            optimizer = autograd.DistributedOptimizer(
                optim.sgd, [rpc.RRef(other)], lr=0.1
            )
            optimizer.step(context_id)
        _, pullback = jax.vjp(
            lambda v: autograd.remote_call("w1", product, v, matrix), x
        )
        remote = pullback(np.ones((ROWS, OUTPUTS), np.float32))
        plain = rpc.rpc_sync("w1", jnp.add, args=(x, 1))
        return found[leaf], found[other], other.value, remote, plain


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("call", [of_replicas, of_a_pipeline, over_workers])
def test_a_mesh_that_is_set_changes_nothing(call, kind, given, tmp_path):
    """A mesh of other devices than those that the library computes on."""
    expected = call(tmp_path / "plain", *given)
    other = jax.make_mesh(
        (2,), ("other",), devices=jax.devices()[4:6], axis_types=(kind,)
    )
    with jax.set_mesh(other):
        found = call(tmp_path / "under", *given)
    leaves = [jax.tree.leaves(tree) for tree in (expected, found)]
    assert len(leaves[0]) == len(leaves[1]) > 1
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, two)
        if isinstance(one, jax.Array):
            assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
