"""`compile` on the CPU that is here: numbers that are known, refusals in words."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import data_parallel, optim, targets
from jdist.targets.compilation import _refused
from jdist.targets.report import size_text

CHIP = targets.Chip("here", "cpu", 2**30, 1e9, {"float32": 1e10}, link_bandwidth=1e9)
ONE = targets.Hardware(CHIP, (1,))
FOUR = targets.Hardware(CHIP, (4,))


def shape(sizes, spec=None, mesh=None, dtype=jnp.float32):
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def test_a_product_on_one_device():
    """Shapes alone; a concrete array gives its shape, a number is passed on."""
    found = targets.compile(
        lambda x, w, k: (x @ w) * k,
        shape((8, 16)),
        jnp.ones((16, 4)).astype("f4"),
        3,
        target=ONE,
    )
    assert found.fits
    assert found.refused == ""
    assert found.flops == 2 * 8 * 16 * 4
    used = found.bytes_per_device
    assert used.outputs == 8 * 4 * 4
    assert 4 * (8 * 16 + 16 * 4) <= used.arguments <= 4 * (8 * 16 + 16 * 4) + 8
    assert found.wanted_bytes == used.total
    assert found.seconds > 0
    assert found.compiler_seconds is None
    assert found.collectives == found.float64 == found.host_callbacks == ()


def test_what_was_lowered_already_takes_no_shapes():
    x = shape((8, 16))
    lowered = jax.jit(lambda x: x @ x.T).lower(x)
    found = targets.compile(lowered, target=ONE)
    assert found.flops == 2 * 8 * 16 * 8
    with pytest.raises(TypeError, match="must be left out where the program was low"):
        targets.compile(lowered, x, target=ONE)


def test_a_sum_over_a_mesh():
    """One all-reduce of the gradient; shapes without a sharding are replicated."""
    mesh = FOUR.mesh({"data": 4})
    loss = jax.value_and_grad(lambda w, x: ((x @ w) ** 2).sum())
    found = targets.compile(
        loss, shape((6, 5)), shape((32, 6), P("data"), mesh), target=FOUR
    )
    kinds = [each.kind for each in found.collectives]
    assert set(kinds) == {"all-reduce"}
    assert sum(each.bytes for each in found.collectives) == (6 * 5 + 1) * 4
    assert all(each.devices == 4 for each in found.collectives)
    # Forward and backward product, on a quarter of the examples.
    assert found.flops == 2 * (2 * 8 * 6 * 5)
    assert found.bytes_per_device.arguments == (6 * 5 + 8 * 6) * 4
    assert found.estimate.communication > 0


def test_scans_count_each_turn():
    """The same product seven times, and its collective."""
    mesh = FOUR.mesh({"model": 4})

    def turns(w, x):
        def turn(x, _):
            return jax.lax.with_sharding_constraint(x @ w, replicated), None

        return jax.lax.scan(turn, x, None, length=7)[0]

    replicated = NamedSharding(mesh, P())
    found = targets.compile(
        turns, shape((8, 8), P("model", None), mesh), shape((4, 8)), target=FOUR
    )
    assert found.flops == 7 * 2 * 4 * 2 * 8
    assert sum(each.count for each in found.collectives) == 7


def test_donation_is_told():
    """What a result took over, and what none fitted into."""
    step = jax.jit(lambda a, b, c: (a + 1, b.sum() + c), donate_argnums=(0, 1))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        found = targets.compile(step, shape((5, 3)), shape((7,)), shape(()), target=ONE)
    assert found.donated == ("f32[5,3]",)
    assert found.donated_in_vain in ((), ("f32[7]",))
    assert found.bytes_per_device.aliased == 60


def training_step(plant=""):
    """A step over replicas, lowered for the mesh of `FOUR`; with a fault planted."""

    def losses(params, x):
        h = jnp.tanh(x @ params["w"])
        if plant == "collective":
            # All rows of all replicas: one gather more, and a scatter for its gradient.
            h = h + jax.lax.all_gather(h, "data").mean(0)
        return (h @ params["v"]) ** 2

    params = {"w": shape((6, 5)), "v": shape((5,))}
    optimizer = optim.sgd(lr=0.1, momentum=0.9)
    step = data_parallel.train_step(losses, optimizer, FOUR.mesh({"data": 4}))
    return step.lower(step.init(params), shape((8, 6)))


def test_a_planted_collective_is_found():
    kinds = [
        [each.kind for each in targets.compile(lowered, target=FOUR).collectives]
        for lowered in (training_step(), training_step("collective"))
    ]
    assert kinds[0] == ["all-reduce"]
    assert len(kinds[1]) > 1
    assert "all-gather" in kinds[1]


def test_a_lost_donation_is_found():
    """Of a step that never donated, and of state that comes back in another type."""
    kept = targets.compile(training_step(), target=FOUR)
    state = 2 * 4 * (6 * 5 + 5)
    assert kept.bytes_per_device.aliased >= state
    assert kept.donated_in_vain == ()

    def step(w, momentum, x):
        momentum = 0.9 * momentum + x.T @ (x @ w)
        return w - 0.1 * momentum, momentum.astype(jnp.bfloat16)

    arguments = (shape((6, 5)), shape((6, 5)), shape((8, 6)))
    found = targets.compile(jax.jit(step), *arguments, target=ONE)
    assert found.donated == ()
    assert found.bytes_per_device.aliased == 0
    donating = jax.jit(step, donate_argnums=(0, 1))
    found = targets.compile(donating, *arguments, target=ONE)
    assert found.donated == found.donated_in_vain == ("f32[6,5]",)
    assert found.bytes_per_device.aliased == 4 * 6 * 5


def test_what_is_too_large_is_an_answer():
    """With the bytes that it wants; printed, and as JSON."""
    small = targets.Hardware(
        targets.Chip("small", "cpu", 1000, 1e9, {"float32": 1e9}), (1,)
    )
    found = targets.compile(lambda x: x + 1, shape((500,)), target=small)
    assert not found.fits
    assert found.wanted_bytes >= 4000
    assert size_text(found.wanted_bytes) in found.refused
    assert "does not fit" in str(found)
    assert json.loads(found.to_json())["fits"] is False


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (111.5G) exceeds available HBM (15.75G).",
            int(111.5 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 35.25G of 15.75G hbm.",
            int(35.25 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: No number.", None),
    ],
)
def test_the_compilers_refusal_is_read(message, wanted):
    """Its own words, and the number in them."""
    found = _refused(targets.CompiledProgram("v5e:2x2", 2**34, None), message)
    assert not found.fits
    assert found.wanted_bytes == wanted
    assert found.refused == message.removeprefix("RESOURCE_EXHAUSTED: ")
    assert found.seconds is None
    assert "does not fit" in str(found)


def test_a_float64_leak_is_found():
    """By the place in the function; a program of float32 has none."""

    def leak(x):
        return (x.astype("f8") * jnp.float64(0.1)).astype("f4")

    found = targets.compile(jax.jit(leak), shape((3,)), target=ONE)
    assert any("convert_element_type" in place for place in found.float64)
    assert any("mul" in place for place in found.float64)
    assert "float64" in str(found)
    wide = targets.compile(jnp.negative, shape((3,), dtype=jnp.float64), target=ONE)
    assert wide.float64
    assert not any("HloModule" in place for place in wide.float64)


def test_host_callbacks_are_found():
    """By their names, also under a loop."""

    def turn(x, _):
        jax.debug.callback(len, x)
        return jax.pure_callback(np.sin, x, x), None

    found = targets.compile(
        lambda x: jax.lax.scan(turn, x, None, length=2), shape((3,)), target=ONE
    )
    assert any("pure_callback" in place for place in found.host_callbacks)
    assert any("debug_callback" in place for place in found.host_callbacks)


def test_callbacks_where_no_host_can_be_lowered_for():
    """The error of JAX there speaks of a backend; ours names the callbacks."""

    class Traced:
        jaxpr = jax.make_jaxpr(lambda x: jax.pure_callback(np.sin, x, x))(1.0)

        def lower(self):
            raise RuntimeError("Unknown backend: 'gpu' requested")

    class Function:
        def trace(self, *_):
            return Traced()

        def lower(self, *_):
            raise AssertionError

    with pytest.raises(ValueError, match=r"must not call back.*Got pure_callback"):
        targets.compile(Function(), shape((3,)), target=ONE)


def test_whatever_can_be_lowered():
    """An object with `lower` alone, such as a step that places its own arguments."""

    class Step:
        def lower(self, *arguments):
            return jax.jit(lambda x: x.T @ x).lower(*arguments)

    assert targets.compile(Step(), shape((8, 2)), target=ONE).flops == 2 * 8 * 2 * 2


def test_shardings_of_elsewhere_are_refused():
    """Also none at all, where there is more than one chip; and what is no function."""
    elsewhere = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[6:])
    with pytest.raises(
        ValueError, match=r"laid out over devices of here:4.*target.mesh"
    ):
        targets.compile(jnp.sin, shape((4,), P("data"), elsewhere), target=FOUR)
    with pytest.raises(ValueError, match="say for one argument how it is laid out"):
        targets.compile(jnp.sin, shape((4,)), target=FOUR)
    with pytest.raises(TypeError, match=r"must be a function or have .*Got an int"):
        targets.compile(3, shape((4,)), target=ONE)


def test_the_table_shows_what_was_found():
    """Estimates are labelled, and their model stands below."""
    mesh = FOUR.mesh({"data": 4})
    found = targets.compile(
        lambda x: x.sum(), shape((64, 8), P("data"), mesh), target=FOUR
    )
    shown = str(found)
    for text in ("here:4: fits", "bytes per device", "estimate", "all-reduce", "waits"):
        assert text in shown
    assert "Estimate by roofline" in shown
    record = json.loads(found.to_json())
    assert record["collectives"][0]["kind"] == "all-reduce"
    assert record["estimate"]["seconds"] == record["seconds"] == found.seconds
