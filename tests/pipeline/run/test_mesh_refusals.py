"""Meshes, shardings and batches that a pipeline refuses, and what it says to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import pipeline

SCHEDULE = pipeline.one_f_one_b(2, 2)


def mesh(first, *shape, names=("data", "model")):
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))])
    return Mesh(devices.reshape(shape), names[: len(shape)])


def made(places, **options):
    stages = [
        pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",)),
        pipeline.Stage(lambda w, h: h @ w, ("h",), ("y",)),
    ]
    return pipeline.Pipeline(
        stages, lambda y, batch: (y**2).sum(-1), SCHEDULE, places, **options
    )


def params():
    return [jnp.arange(12.0).reshape(4, 3), jnp.arange(6.0).reshape(3, 2)]


def batch(examples=8):
    return {"x": np.linspace(-1, 1, 4 * examples).reshape(examples, 4)}


def refused(error, message, run):
    with pytest.raises(error, match=re.escape(message)):
        run()


def test_what_is_no_place():
    refused(
        TypeError,
        "must be devices and meshes. Got 3 for worker 1",
        lambda: made([mesh(0, 2), 3]),
    )
    sharding = NamedSharding(mesh(0, 2), P())
    refused(TypeError, "for worker 0", lambda: made([sharding, mesh(2, 2)]))


def test_meshes_that_overlap_in_part():
    message = "must have all devices in common or none"
    refused(ValueError, message, lambda: made([mesh(0, 4), mesh(2, 4)]))
    refused(
        ValueError,
        "for the workers 0 and 1. Give both the same mesh",
        lambda: made([mesh(0, 2), jax.devices()[1]]),
    )


def test_axes_that_are_manual():
    manual = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Manual,))
    refused(
        ValueError,
        "must be meshes with automatic or explicit axes. Got axes of type Manual for "
        "worker 0. Make it by jax.sharding.Mesh(devices, names)",
        lambda: made([manual, mesh(2, 2)]),
    )


def test_a_data_axis_that_no_mesh_has():
    refused(
        ValueError,
        "Got 'rows', where the axes are ['data', 'model']",
        lambda: pipeline.Meshes([mesh(0, 2, 2), mesh(4, 2)], data_axis="rows"),
    )
    refused(
        ValueError,
        "Got 'data', where the axes are []",
        lambda: pipeline.Meshes(jax.devices()[:2], data_axis="data"),
    )


def test_specifications_that_do_not_fit():
    pipe = made([mesh(0, 2, 2), jax.devices()[4]])
    place = pipe.place
    refused(
        ValueError,
        "must fit the mesh of stage 0, with axes ['data', 'model']. "
        "Got P('expert',) for shape (4, 3): ",
        lambda: place(params(), [P("expert"), None]),
    )
    refused(
        ValueError,
        "Got P(None, 'model') for shape (4, 3): ",
        lambda: place(params(), [P(None, "model"), None]),
    )
    refused(
        ValueError,
        "Got P(None, None, 'model') for shape (4, 3): ",
        lambda: place(params(), [P(None, None, "model"), None]),
    )
    refused(
        ValueError,
        "must be None for stage 1, whose place is no mesh",
        lambda: place(params(), [None, P("model")]),
    )
    refused(
        ValueError,
        "must be a tree like the parameters, or a part of it",
        lambda: place(params(), [{"w": P("model")}, None]),
    )
    refused(ValueError, "must be a list of 2 trees", lambda: place(params(), [None]))


def test_parameters_sharded_over_axes_that_the_mesh_has_not():
    """Where they are used, too; a sharding of another mesh with that axis is kept."""
    pipe = made([mesh(0, 2), mesh(2, 2)])
    there = mesh(4, 2, names=("model",))
    given = params()
    given[0] = jax.device_put(given[0], NamedSharding(there, P("model")))
    message = "mesh of stage 0, with axes ['data']. Got P('model',) for shape (4, 3): "
    refused(ValueError, message, lambda: pipe.place(given))
    refused(ValueError, message, lambda: pipe.value_and_grad(given, batch()))
    given[0] = jax.device_put(given[0], NamedSharding(mesh(4, 2), P("data")))
    placed = pipe.place(given)
    assert placed[0].sharding == NamedSharding(mesh(0, 2), P("data"))


def test_a_batch_that_the_data_axis_cannot_split():
    pipe = made([mesh(0, 4), mesh(4, 2, 2)])
    refused(
        ValueError,
        "must have 4 examples for each of the 2 micro-batches, one for "
        "each part of the data axis. Got 7 examples. Make the batch larger",
        lambda: pipe.value_and_grad(pipe.place(params()), batch(7)),
    )


def test_a_batch_that_was_put_elsewhere():
    pipe = made([mesh(0, 2), mesh(2, 2)])
    given = jax.device_put(batch(), jax.devices()[0])
    refused(
        ValueError,
        "where stage 0 takes it. Got 'x' on",
        lambda: pipe.value_and_grad(pipe.place(params()), given),
    )
    there = NamedSharding(mesh(0, 2), P("data"))
    given = jax.tree.map(lambda x: jax.device_put(x, there), batch())
    pipe.value_and_grad(pipe.place(params()), given)


def test_a_transformation_around_it():
    pipe = made([mesh(0, 2), mesh(2, 2)])
    placed = pipe.place(params())
    message = "must be called outside of jax.jit, jax.grad and other transformations"
    refused(ValueError, message, lambda: jax.jit(pipe.value_and_grad)(placed, batch()))
    refused(ValueError, message, lambda: jax.jit(pipe.place)(params()))


def test_meshes_may_leave_devices_out_and_be_shared():
    """Two workers on one mesh, as on one device; of eight devices two are used."""
    shared = mesh(5, 2)
    pipe, alone = made([shared, shared]), made(None)
    found = pipe.value_and_grad(pipe.place(params()), batch())
    expected = alone.value_and_grad(params(), batch())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
