"""What jdist relies on in JAX beyond its documented surface; JAX changes show here."""

import os
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jdist import _compat
from jdist._compat import Ahead, internals, paced
from jdist._compat.run_ahead import IN_FLIGHT
from jdist.rpc.group.rendezvous import ReservedPort

pytestmark = pytest.mark.compiled


class Memory(bytearray):
    """Memory whose end can be seen."""


def test_a_name_that_jax_has_no_more_is_told_at_import():
    """With the releases that are supported, and not by a step in its middle."""
    message = (
        rf"jdist needs a release of JAX that it was tested with, 0\.10\.2 or newer "
        rf"\(docs/install\.md\): `jax\._src\.{{}}` is not in the installed one, "
        rf"{re.escape(jax.__version__)}\. Install a tested release, or a newer jdist\."
    )
    for module, name in (("core", "gone"), ("gone", "core")):
        with pytest.raises(ImportError, match=message.format(rf"{module}\.{name}")):
            internals._internal(module, name)


def test_double_precision_is_local():
    """float64 exists inside, whatever the setting outside, and only there."""
    with jax.enable_x64(False):
        with _compat.double_precision():
            assert jnp.asarray(1.0).dtype == jnp.float64
        assert jnp.asarray(1.0).dtype == jnp.float32


def test_a_platform_that_is_not_here():
    """JAX says an AssertionError without a word where there is no GPU."""
    program = (
        "from jdist import _compat\n"
        "try:\n"
        "    _compat.require_backend()\n"
        "except _compat.runtime.Unavailable as error:\n"
        "    print(error)"
    )
    try:
        jax.devices("cuda")
    except (RuntimeError, AssertionError):
        missing = "cuda"
    else:
        missing = "rocm"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": missing},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    rule = "`JAX_PLATFORMS` must name a platform of which there is a device here. Got "
    assert done.stdout.startswith(rule + missing)
    assert "JAX_PLATFORMS=cpu runs everywhere" in done.stdout


def test_traced_values_are_told_from_concrete_ones():
    """Inside jit a value is traced; outside, and for Python numbers, it is not."""
    seen = []
    jax.jit(lambda x: seen.append(_compat.is_traced(x)))(1.0)
    assert seen == [True]
    assert not _compat.is_traced(jnp.ones(2))
    assert not _compat.is_traced(1.0)


def test_arrays_with_numbers_are_of_one_class():
    """But not keys, of which a program takes the words."""
    for array in (jnp.ones(2), jax.device_put(1.0), jax.jit(jnp.sin)(1.0)):
        assert type(array) is _compat.ArrayImpl
    assert type(jax.random.key(0)) is not _compat.ArrayImpl


@pytest.mark.parametrize("dtype", ["float32", "float64", "int4", "complex128", "bool"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 5)])
def test_placing_is_device_put(dtype, shape):
    """The same array on the same device, which every computation takes."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))
    for device in (None, jax.devices("cpu")[3]):
        got, expected = _compat.placed(array, device), jax.device_put(array, device)
        assert type(got) is type(expected)
        assert (got.aval, got.sharding) == (expected.aval, expected.sharding)
        assert got.committed == expected.committed == (device is not None)
        np.testing.assert_array_equal(np.asarray(got), array)
        same = jax.jit(lambda x: x[..., None])
        np.testing.assert_array_equal(np.asarray(same(got)), array[..., None])


def test_a_cotangent_goes_where_its_value_is():
    """Committed if that is; and not moved for a value that may be anywhere."""
    first, third = jax.devices("cpu")[0], jax.devices("cpu")[2]
    arrays = [
        jnp.float32([3, 7]),
        *(jax.device_put(jnp.float32([3, 7]), d) for d in (first, third)),
    ]
    found = {
        (i, k): (got.committed, *got.devices())
        for i, array in enumerate(arrays)
        for k, value in enumerate(arrays)
        for got in [_compat.beside(array, value)]
        if np.asarray(got).tolist() == [3, 7]
    }
    anywhere, here, there = (False, first), (True, first), (True, third)
    assert found == {
        (0, 0): anywhere, (0, 1): here, (0, 2): there,
        (1, 0): anywhere, (1, 1): here, (1, 2): there,
        (2, 0): there, (2, 1): here, (2, 2): there,
    }  # fmt: skip


def test_an_array_is_put_in_the_place_of_another():
    """On that one's device if it was committed there; else it stays where it is."""
    first, third = jax.devices("cpu")[0], jax.devices("cpu")[2]
    array = jnp.float32([3, 7])
    for before, expected in [
        (jax.device_put(array, third), (True, third)),
        (jnp.float32([1, 2]), (False, first)),
    ]:
        found = _compat.placed_as(array, before)
        assert (found.committed, found.device) == expected
        assert found.tolist() == [3, 7]


def test_memory_that_was_placed_is_let_go():
    """Once its array is gone, and not only when the next one is placed."""
    memory = Memory(4096 + 64)
    gone = weakref.ref(memory)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % 64
    array = _compat.placed(whole[start : start + 4096], None)
    del memory, whole
    _compat.let_go()
    assert gone() is not None
    del array
    _compat.let_go()
    assert gone() is None


@pytest.mark.parametrize("x64", [False, True])
def test_placing_keeps_wide_and_weak_types(x64):
    """What `device_put` would narrow, and what it cannot be told."""
    with jax.enable_x64(x64):
        wide = _compat.placed(np.array([1 / 3, 2.0**53]), None)
        weak = _compat.placed(np.float32([1.5, 2]), None, weak=True)
        assert wide.dtype == np.float64
        assert wide.tolist() == [1 / 3, 2.0**53]
        assert weak.weak_type
        assert (weak + jnp.bfloat16([1, 1])).dtype == jnp.bfloat16


def test_placing_respects_the_default_device():
    """However it was chosen."""
    device = jax.devices("cpu")[2]
    for chosen, expected in ((device, device), ("cpu", jax.devices("cpu")[0])):
        with jax.default_device(chosen):
            assert _compat.placed(np.ones(3), None).devices() == {expected}


def test_placing_what_jax_does_not_have():
    """An error, not memory read in another way."""
    for dtype in ("M8[s]", "U3", jax.dtypes.float0, "O"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Unknown NumPy dtype"):
            _compat.placed(np.zeros(2, dtype), None)


@pytest.mark.parametrize("check", [True, False])
def test_varying_axes_are_seen_only_when_checked(mesh, check):
    """A checking shard_map knows which values vary; a plain one knows nothing."""
    seen = {}

    def body(x, same):
        seen["x"] = _compat.varying_axes(x)
        seen["same"] = _compat.varying_axes(same)
        seen["tracks"] = _compat.tracks_varying_axes("data")
        return x

    spec = PartitionSpec("data")
    jax.shard_map(
        body, mesh=mesh(2), in_specs=(spec, PartitionSpec()), out_specs=spec,
        check_vma=check,
    )(jnp.arange(4.0), jnp.ones(3))  # fmt: skip
    varying = frozenset({"data"} if check else ())
    assert seen == {"x": varying, "same": frozenset(), "tracks": check}


def test_vmap_and_pmap_do_not_track():
    """Their axes are named but carry no types."""
    seen = []

    def body(x):
        seen.append(_compat.tracks_varying_axes("i"))
        return x

    jax.vmap(body, axis_name="i")(jnp.arange(3.0))
    jax.pmap(body, axis_name="i")(jnp.arange(2.0))
    assert seen == [False, False]


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("placed", [True, False])
def test_map_shards_takes_any_mesh_and_any_layout(mesh, types, placed):
    """Explicit meshes refuse inputs laid out otherwise; here they are re-sharded."""
    devices = mesh(4, types)
    shard = PartitionSpec("data")
    fn = _compat.map_shards(
        lambda w, x: jax.lax.psum(x.sum(0) * w, "data"),
        devices,
        (PartitionSpec(), shard),
        PartitionSpec(),
    )
    x = np.arange(24.0).reshape(8, 3)
    given = (
        jax.device_put(x, jax.sharding.NamedSharding(devices, shard)) if placed else x
    )
    expected = x.sum(0) * 2.0
    np.testing.assert_array_equal(jax.jit(fn)(jnp.asarray(2.0), given), expected)


def test_cpu_devices_can_be_chosen_before_the_first_computation():
    """In a fresh process; afterwards JAX refuses, and says so."""
    program = (
        "import jax; from jdist import _compat\n"
        "_compat.set_cpu_device_count(3); print(len(jax.devices('cpu')))\n"
        "_compat.set_cpu_device_count(5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "3\n"
    assert "RuntimeError" in done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_after_changes_no_bit(dtype):
    """Whatever both sides hold, in any shape; what is empty does not wait."""
    odd = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5]
    for value in odd:
        for earlier in odd:
            array = jnp.full((2, 3), value, dtype)
            found = jax.jit(_compat.after)(array, jnp.full((4,), earlier, jnp.float32))
            assert found.tobytes() == array.tobytes()
    nothing = jnp.zeros((0, 3), dtype)
    assert _compat.after(nothing, array).shape == (0, 3)
    assert _compat.after(array, nothing) is array


def test_after_keeps_collectives_apart(mesh):
    """Three sums compile to one; `after` keeps them apart.

    A barrier does so from XLA's version in JAX 0.12 on: `after` is for earlier ones.
    """
    barrier = jax.lax.optimization_barrier

    def counted(chain):
        def body(arrays):
            sums = []
            for array in arrays:
                given = chain(array, sums[-1]) if sums else array
                sums.append(jax.lax.psum(given, "data"))
            return sums

        fn = jax.shard_map(
            body, mesh=mesh(2), in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        arrays = [jnp.arange(n, dtype=jnp.float32) for n in (2, 4, 6)]
        text = jax.jit(fn).lower(arrays).compile().as_text()
        return text.count(" all-reduce(") + text.count(" all-reduce-start(")

    assert counted(lambda array, earlier: array) == 1
    by_barrier = 1 if jax.__version_info__ < (0, 12) else 3
    assert counted(lambda array, earlier: barrier((array, earlier))[0]) == by_barrier
    assert counted(_compat.after) == 3


def test_calls_are_looked_into_and_loops_are_not():
    """A nested jit, a checkpoint, a custom derivative; a scan, a cond, a sum."""

    @jax.custom_jvp
    def own(x):
        return jnp.sin(x)

    own.defjvps(lambda tangent, result, x: tangent)

    def programs(fn):
        equations = jax.make_jaxpr(fn)(1.0).eqns
        return [_compat.called_program(equation) is not None for equation in equations]

    assert programs(jax.jit(jnp.sin)) == [True]
    assert programs(jax.checkpoint(jnp.sin)) == [True]
    assert programs(own) == [True]
    loop = programs(lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, 3)[0])
    assert not any(loop)
    assert not any(programs(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)))


def test_jaxs_coordinator_keeps_values_and_can_be_abandoned():
    """In a group of one; without the last call its exit would be an orderly one."""
    program = """
import sys, jax
from jdist import _compat
from jdist._compat import Ahead, internals
from jdist.rpc.group.rendezvous import ReservedPort
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
client = _compat.distributed_client()
client.key_value_set("folder/key", "value")
assert client.key_value_dir_get("folder/") == [("folder/key", "value")]
client.key_value_delete("folder/key")
assert client.key_value_dir_get("folder/") == []
_compat.abandon_distributed()
assert not jax.distributed.is_initialized()
jax.distributed.shutdown()
"""
    with ReservedPort() as reserved:
        command = [sys.executable, "-c", program, str(reserved.port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_is_computed_says_so():
    """PRNG keys too. What is under way: `tests/verify/test_processes.py`."""
    assert _compat.is_computed(jnp.ones(3).block_until_ready())
    assert _compat.is_computed(jax.block_until_ready(jax.random.key(1)))


@pytest.fixture
def launch(mesh):
    """Calls `paced` for arrays; returns what it has waited for, and the arrays."""
    # In a thread of its own nothing is in flight yet.
    with ThreadPoolExecutor(1) as thread:

        def run(count, place=None, *, donated=(), failing=False):
            place = mesh(2) if place is None else place
            waited, results = [], [jnp.full(3, number) for number in range(count)]

            def wait(arrays):
                waited.extend(arrays)
                if failing:
                    raise jax.errors.JaxRuntimeError("a callback failed")

            def launch_all():
                for number, result in enumerate(results):
                    if number == count - 1:
                        for earlier in donated:
                            results[earlier].delete()
                    paced(place, {"large": jnp.ones(5), "small": result}, wait=wait)

            thread.submit(launch_all).result()
            return waited, results

        yield run


def test_a_launch_over_cpu_devices_waits_for_an_earlier_one(launch):
    """For the fourth oldest of eight, which leaves four, then eight again."""
    half = IN_FLIGHT // 2
    waited, first = launch(IN_FLIGHT - 1)
    assert waited == []
    waited, then = launch(1 + half)
    assert len(waited) == 2
    assert waited[0] is first[half - 1]
    assert waited[1] is then[0]


@pytest.mark.parametrize("last", [IN_FLIGHT // 2, IN_FLIGHT - 2])
def test_donated_results_of_launches_are_passed_over(launch, last):
    """The last launch's no program can have been given yet."""
    (waited,), results = launch(IN_FLIGHT, donated=range(last + 1))
    assert waited is results[last + 1]


def test_a_failed_launch_is_left_to_the_reader_of_its_result(launch):
    waited, _ = launch(IN_FLIGHT, failing=True)
    assert len(waited) == 1


def test_no_launch_waits_where_devices_do_not_share_threads(launch, mesh):
    """Nor where there is nothing to wait for, inside of a transformation."""
    for place in (2, jax.devices()[0], mesh(1)):
        assert launch(2 * IN_FLIGHT, place)[0] == []

    def traced(x):
        paced(mesh(2), x, wait=pytest.fail)
        return x

    for number in range(2 * IN_FLIGHT):
        jax.make_jaxpr(traced)(np.zeros(number))


@pytest.mark.parametrize("committed", [False, True])
def test_what_is_compiled_ahead_is_found_by_the_call(caplog, committed):
    """By shapes and places alone; the results of one call are arguments of the next."""
    device = jax.devices()[1 if committed else 0]

    def scaled(x, rate, name):
        return {name: x * rate, "total": x.sum() * 2, "rate": rate}

    def added(first, second):
        return first + second

    scale, add = jax.jit(scaled, static_argnums=2), jax.jit(added, donate_argnums=0)
    place = jax.sharding.SingleDeviceSharding(device) if committed else None
    shape = jax.ShapeDtypeStruct((3, 5), jnp.float32, sharding=place)
    ahead = Ahead()
    told = ahead(scale, shape, 0.5, "y")
    ahead(add, told["y"], told["y"])
    assert told["rate"].weak_type
    ahead.compile()
    x = np.ones((3, 5), np.float32)
    x = jax.device_put(x, device) if committed else x
    with jax.log_compiles():
        caplog.clear()
        found = scale(x, 0.5, "y")
        add(found["y"], found["y"] + 0)
    text = caplog.text
    assert "jit(scaled)" not in text
    assert "jit(added)" not in text


def test_the_data_of_each_device_in_the_order_of_the_sharding():
    """Also of an array that is whole on each, and of one device."""
    devices = np.array(jax.devices()[:4])[::-1].reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b"))
    value = np.arange(8.0).reshape(4, 2)
    for spec in (PartitionSpec(), PartitionSpec("a"), PartitionSpec(("b", "a"))):
        array = jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))
        found = _compat.shards_of(array)
        assert [x.device for x in found] == list(devices.flat)
        expected = {each.device: each.data for each in array.addressable_shards}
        for part in found:
            np.testing.assert_array_equal(part, expected[part.device])
    (alone,) = _compat.shards_of(jax.device_put(value, devices[0, 0]))
    assert alone.device == devices[0, 0]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, i: jnp.take_along_axis(x, i, -1), True),
        (
            lambda x, i: jax.lax.map(lambda j: jnp.take_along_axis(x, j, -1), i[None]),
            True,
        ),
        (jax.jit(lambda x, i: jnp.take_along_axis(x, i, -1)), True),
        (lambda x, i: x[i[0, 0]], False),
        (lambda x, i: x @ x.T + jax.nn.one_hot(i[:, 0], 3, dtype=x.dtype), False),
    ],
)
def test_a_program_that_picks_by_row_is_known(fn, expected):
    given = jnp.ones((3, 3)), jnp.zeros((3, 1), jnp.int32)
    program = jax.make_jaxpr(fn)(*given).jaxpr
    assert _compat.picks_by_row(program) is expected
