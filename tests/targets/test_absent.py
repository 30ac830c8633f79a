"""Programs compiled for hardware that is not here; skipped without the compilers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import targets
from tests.targets.installed import needs


def on(*names):
    """Parameters: hardware, skipped by name where its compiler is missing."""
    return pytest.mark.parametrize(
        "hardware",
        [
            pytest.param(found, marks=needs(found.chip.platform), id=name)
            for name, found in ((name, targets.target(name)) for name in names)
        ],
    )


EVERYWHERE = on("v5e:2x2", "h100:1x4")


def shape(mesh, sizes, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))


@on(
    *("v5e:1x1", "v5e:2x4", "v5e:4x4", "v6e:1x1", "v6e:4x4", "v5p:2x2x1", "v5p:4x4x8"),
    *("h100:2x8", "a100:1x4", "b200:1x8"),
)
def test_the_compiler_agrees_on_chips_and_hosts(hardware):
    """What the name says, without a compiler, is what the compiler has."""
    assert len(hardware.devices) == hardware.chips
    assert len({device.process_index for device in hardware.devices}) == hardware.hosts
    assert hardware.mesh({"data": hardware.chips}).size == hardware.chips


@on("v5e:3x3")
def test_a_slice_that_there_is_not(hardware):
    """The compiler says why."""
    with pytest.raises(ValueError, match=r"must be a slice that the compiler knows"):
        hardware.devices  # noqa: B018


def step(params, x):
    """A scan over layers, split over "model", and an output layer."""

    def loss(params):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, x, params["layers"])
        return ((h @ params["out"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    rate = jnp.bfloat16(0.1)
    return jax.tree.map(lambda w, g: w - rate * g, params, grads), value


@on("v5e:4x4", "v6e:4x4", "v5p:2x2x4", "h100:2x8", "a100:2x8", "b200:2x8")
def test_a_training_step_over_two_axes(hardware):
    """Operations by the formula, loops and all; collectives and donation are told."""
    mesh = hardware.mesh({"data": 4, "model": 4})
    params = {
        "layers": shape(mesh, (6, 1024, 1024), None, None, "model"),
        "out": shape(mesh, (1024, 256)),
    }
    found = targets.compile(
        jax.jit(step, donate_argnums=0),
        params,
        shape(mesh, (512, 1024), "data"),
        target=hardware,
    )
    assert found.fits
    # Forward and two backward products of each layer; the output layer's three are
    # split over the axis "model" or repeated, as the compiler likes it.
    layers = 3 * 6 * 2 * 128 * 1024 * 256
    output = 3 * 2 * 128 * 1024 * 256
    assert layers + output / 4 <= found.flops <= layers + output
    kinds = {each.kind for each in found.collectives}
    assert {"all-reduce", "all-gather"} <= kinds
    assert {each.devices for each in found.collectives} == {4}
    loops = [each for each in found.collectives if each.count == 6]
    assert sum(each.kind == "all-gather" for each in loops) == 2
    assert found.donated == ("bf16[6,1024,256]",)
    assert found.seconds >= found.estimate.compute > 0
    assert (found.compiler_seconds is None) == (hardware.chip.platform != "tpu")
    assert found.float64 == found.host_callbacks == ()


@EVERYWHERE
def test_convolutions(hardware):
    """Forward, and backward in the input and the kernel: taps on padding are none."""
    mesh = hardware.mesh({"data": 4})

    def loss(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum().astype(jnp.float32)

    found = targets.compile(
        jax.grad(loss, (0, 1)),
        shape(mesh, (64, 56, 56, 64), "data"),
        shape(mesh, (3, 3, 64, 128)),
        target=hardware,
    )
    # Of 28 x 3 taps along an axis one lies on the padding behind; a GPU pads first.
    taps = 83 if hardware.chip.platform == "tpu" else 84
    assert found.flops == 3 * 2 * 16 * 64 * 128 * taps**2


@EVERYWHERE
def test_what_is_too_large_is_refused_with_the_bytes_that_it_wants(hardware):
    """An answer, not an exception."""
    mesh = hardware.mesh({"data": 4})
    found = targets.compile(
        lambda x: jnp.sin(x @ x) @ x.T,
        shape(mesh, (300_000, 300_000), "data"),
        target=hardware,
    )
    assert not found.fits
    assert found.wanted_bytes > hardware.chip.memory
    assert found.refused


@EVERYWHERE
def test_a_float64_leak_is_found(hardware):
    """Also where the compiler takes such types apart, as a TPU's does."""
    mesh = hardware.mesh({"data": 4})
    found = targets.compile(
        lambda x: (x.astype("f8") * jnp.float64(0.1)).astype("f4"),
        shape(mesh, (8, 3), "data", dtype=jnp.float32),
        target=hardware,
    )
    assert any("mul" in place for place in found.float64)


def sine(x):
    return jax.pure_callback(jnp.sin, x, x)


@on("v5e:2x2")
def test_a_callback_is_found(hardware):
    mesh = hardware.mesh({"data": 4})
    x = shape(mesh, (8,), dtype=jnp.float32)
    found = targets.compile(sine, x, target=hardware)
    assert any("pure_callback" in place for place in found.host_callbacks)


@on("h100:1x4")
def test_a_callback_is_refused(hardware):
    """Where JAX cannot lower it without a host."""
    mesh = hardware.mesh({"data": 4})
    x = shape(mesh, (8,), dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"must not call back .*Got pure_callback"):
        targets.compile(sine, x, target=hardware)


@on("v5e:1x1", "h100:1x1")
def test_one_chip_needs_no_shardings(hardware):
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    found = targets.compile(lambda x: x.T @ x, x, target=hardware)
    assert found.flops == 2 * 128 * 128 * 256
    assert found.collectives == ()
