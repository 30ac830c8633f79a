"""Modules on other workers: called, trained, listed and sent, as if they were here."""

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import rpc
from tests.rpc import module_cases
from tests.rpc.module_cases import Network, Silent, Table, inputs, same
from tests.rpc.sockets import wait_until

NAMES = [
    "branch.layers.0.bias", "branch.layers.0.kernel", "branch.layers.1.bias",
    "branch.layers.1.kernel", "norm.bias", "norm.scale", "scale",
]  # fmt: skip


def refused(call, kind, match):
    with pytest.raises(kind, match=match) as caught:
        call()
    return caught.value


def calls():
    here, there = Network(3), rpc.RemoteModule("worker1", Network, kwargs={"seed": 3})
    assert there.module_rref.owner_name() == "worker1"
    x = inputs()
    for module in (here, there):
        module.eval()
    assert same(there(x), here(x))
    assert same(there(x, twice=True), here(x, twice=True))
    assert same(there.rpc_sync(timeout=20.0)(x), here(x))
    assert same(there.rpc_async()(x).wait(), here(x))
    assert same(there.remote()(x).to_here(), here(x))
    assert there.remote()(x).owner_name() == "worker1"
    assert same(there.rpc_sync().encode(x), here.encode(x))


def test_it_computes_what_the_local_one_does(cluster):
    cluster.run(0, calls)


def listing():
    here, there = Network(5), rpc.RemoteModule("worker1", Network, (5,))
    listed = there.parameters()
    assert list(listed) == NAMES
    flat = dict(nnx.to_flat_state(nnx.state(here, nnx.Param)))
    expected = {".".join(map(str, path)): one[...] for path, one in flat.items()}
    for name, rref in listed.items():
        assert rref.owner_name() == "worker1"
        copy = rref.to_here()
        assert (copy.name, repr(copy)) == (name, f"Parameter({name!r})")
        assert same(copy.value, expected[name])
        assert same(rref.rpc_sync().get(), expected[name])
    assert list(there.parameters(recurse=False)) == ["scale"]


def test_its_parameters_are_listed_by_path(cluster):
    """A parameter of a layer that is used twice is there once."""
    cluster.run(0, listing)


def replacing():
    here, there = Network(6), rpc.RemoteModule("worker1", Network, (6,))
    x = inputs(4)
    here.eval(), there.eval()
    parameters = there.parameters()
    new = jnp.asarray(np.random.default_rng(1).normal(size=(5, 7)), "float32")
    before = there(x)
    copy = parameters["branch.layers.0.kernel"].to_here()
    parameters["branch.layers.0.kernel"].rpc_sync().set(new)
    here.branch.layers[0].kernel[...] = new
    assert not same(there(x), before)
    assert same(there(x), here(x))
    copy.value = 2 * new  # A copy belongs to nobody.
    assert same(copy.get(), 2 * new)
    assert same(there(x), here(x))
    # A NumPy array becomes what the parameter was.
    parameters["scale"].rpc_sync().set(np.asarray([3, 5, 7], np.float32))
    here.scale[...] = jnp.asarray([3, 5, 7], "float32")
    assert same(there(x), here(x))


def test_a_parameter_is_replaced_by_path(cluster):
    cluster.run(0, replacing)


def descend(references, gradients, rate):
    """What an optimizer does on the owner: the cells are there, and it sets them."""
    for rref, gradient in zip(references, gradients, strict=True):
        cell = rref.local_value()
        cell.value = cell.value - rate * gradient


def training():
    here, there = Network(7), rpc.RemoteModule("worker1", Network, (7,))
    rng = np.random.default_rng(7)
    x = inputs(8)
    here.eval(), there.eval()
    local = [one for _, one in nnx.to_flat_state(nnx.state(here, nnx.Param))]
    references = list(there.parameters().values())
    rate = jnp.asarray(0.1, "float32")
    for _ in range(3):
        gradients = [jnp.asarray(rng.normal(size=p.shape), p.dtype) for p in local]
        rpc.rpc_sync("worker1", descend, args=(references, gradients, rate))
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(here, nnx.Param))]
        local = [
            nnx.Param(old[...] - rate * gradient)
            for old, gradient in zip(local, gradients, strict=True)
        ]
        nnx.update(here, nnx.from_flat_state(zip(paths, local, strict=True)))
        assert same(there(x), here(x))


def test_an_optimizer_on_the_owner_steps_what_the_module_uses(cluster):
    cluster.run(0, training)


def equal_cells(first, second):
    return first.local_value() == second.local_value(), len(
        {first.local_value(), second.local_value()}
    )


def identity():
    there = rpc.RemoteModule("worker1", module_cases.shared_layer, (8,))
    one, same_one = there.parameters()["kernel"], there.parameters()["kernel"]
    other = there.parameters()["bias"]
    assert rpc.rpc_sync("worker1", equal_cells, args=(one, same_one)) == (True, 1)
    assert rpc.rpc_sync("worker1", equal_cells, args=(one, other)) == (False, 2)
    assert one.to_here() != one.to_here()


def test_the_same_parameter_is_equal_to_itself(cluster):
    """However often it is listed; so gradients can be kept by parameter."""
    cluster.run(0, identity)


def wrong_values():
    layer = rpc.RemoteModule("worker1", module_cases.shared_layer, (9,))
    bias = layer.parameters()["bias"]
    before = bias.to_here().value
    for wrong, got in (
        (jnp.zeros((2, 4), "float32"), r"float32 of shape \(2, 4\)"),
        (jnp.zeros(4, "float16"), r"float16 of shape \(4,\)"),
        (1.0, "a float"),
    ):
        rule = r"`bias.value` must be float32 of shape \(4,\), as before"
        refused(
            lambda wrong=wrong: bias.rpc_sync().set(wrong),
            ValueError,
            rf"{rule}. Got {got}",
        )
    assert same(bias.to_here().value, before)


def test_a_parameter_keeps_its_shape_and_dtype(cluster):
    cluster.run(0, wrong_values)


def modes():
    here, there = Network(10), rpc.RemoteModule("worker1", Network, (10,))
    x = inputs(32)
    for turn in range(2):
        for module in (here, there):
            module.train()
        # Dropout draws the same, and the statistics move the same way.
        assert same(there(x), here(x))
        assert not same(there(x), (here(x), there(x))[1])
        here(x)
        for module in (here, there):
            module.eval()
        assert same(there(x), here(x)), turn
        assert same(there(x), there(x))
    assert there.train() is there
    assert there.train(False) is there
    assert same(there(x), here(x))


def test_training_and_evaluation_are_passed_through(cluster):
    cluster.run(0, modes)


def layer_of_flax():
    here = module_cases.shared_layer(11)
    there = rpc.RemoteModule("worker1", module_cases.shared_layer, (11,))
    assert same(there(inputs()), here(inputs()))
    assert there.train().eval() is there
    assert list(there.parameters()) == ["bias", "kernel"]
    refused(
        lambda: there.rpc_sync().set_attributes(),
        rpc.ForbiddenFunction,
        "must be defined in a module that other workers may name",
    )


def test_a_layer_of_flax_itself_needs_no_permission(cluster):
    """Its call and its modes; nothing else of Flax is opened."""
    cluster.run(0, layer_of_flax)


def methods():
    there = rpc.RemoteModule("worker1", Network, (12,))
    hidden = there.module_rref.rpc_sync()
    assert refused(hidden.fail, KeyError, "no such layer")
    refused(lambda: hidden._inner, AttributeError, "public methods only")
    refused(hidden.shell, AttributeError, "has no attribute 'shell'")
    refused(hidden.mode, rpc.ForbiddenFunction, "must be a method that its class")
    refused(hidden.absent, AttributeError, "has no attribute 'absent'")
    shadowed = rpc.RemoteModule("worker1", module_cases.Shadowed)
    assert shadowed.eval() is shadowed  # Flax's, not the attribute's.


def test_only_methods_are_reached(cluster):
    cluster.run(0, methods)


def other_objects():
    rows = {"a": jnp.asarray([1.5, 2.5]), "b.c": jnp.asarray([3.5])}
    table = rpc.RemoteModule("worker1", Table, (rows,))
    assert same(table("a"), 2 * rows["a"])
    listed = table.parameters()
    assert list(listed) == ["a", "b.c"]
    assert list(table.parameters(recurse=False)) == ["a"]
    rpc.rpc_sync("worker1", descend, args=([listed["a"]], [rows["a"] / 2], 1.0))
    assert same(listed["a"].rpc_sync().read(), rows["a"] / 2)
    assert same(table("a"), rows["a"])
    assert [table.eval().rpc_sync().is_frozen(), table.train().rpc_sync().is_frozen()]
    assert not table.rpc_sync().is_frozen()
    silent = rpc.RemoteModule("worker1", Silent)
    assert silent.rpc_sync().answer() == 42
    rule = "needs a Flax NNX module, or an object with a method `parameters`. Got a"
    refused(silent.parameters, TypeError, rule)
    refused(silent.train, AttributeError, "has no attribute 'train'")
    refused(silent, rpc.ForbiddenFunction, "must be a method that its class defines")
    wrong = rpc.RemoteModule("worker1", module_cases.Wrong)
    rule = "needs the method `parameters` of Wrong to return cells by their names. Got"
    refused(wrong.parameters, TypeError, rule)


def test_any_object_is_a_module(cluster):
    """Its method `parameters` gives the cells themselves."""
    cluster.run(0, other_objects)


def failures(name):
    make = rpc.RemoteModule
    error = refused(
        lambda: make("worker1", module_cases.broken, (5,)),
        ValueError,
        "cannot make a network of 5",
    )
    assert any("worker1" in note for note in error.__notes__)
    refused(lambda: make("worker1", Network), TypeError, "missing 1 required pos")
    refused(lambda: make("worker1", 5), TypeError, "that returns the module")
    refused(
        lambda: make("worker1", module_cases.later, (1,)), TypeError, "not a future"
    )
    refused(lambda: make("worker1", lambda: 1), ValueError, "by its name")
    refused(
        lambda: make("worker1", subprocess.run, (["ls"],)),
        rpc.ForbiddenFunction,
        "that other workers may name",
    )
    refused(lambda: make("nobody", Network, (1,)), rpc.RpcError, "could not find")
    refused(
        lambda: make("worker1", module_cases.stuck, (name,), timeout=0.05),
        rpc.RpcTimeout,
        r"more than set timeout \(50 ms\)",
    )
    there = make("worker1", Network, (1,))
    refused(
        lambda: there.rpc_sync(timeout=0.05).wait_at(name),
        rpc.RpcTimeout,
        r"more than set timeout \(50 ms\)",
    )
    rpc.rpc_sync("worker1", module_cases.open_gate, args=(name,))


def test_what_goes_wrong_is_raised_here(cluster):
    cluster.run(0, failures, f"failures {cluster.kind}")


def use(module, x):
    """On a third worker: it calls, lists and changes, and gives it back."""
    scale = module.parameters()["scale"]
    scale.rpc_sync().set(scale.to_here().value + 1)
    return rpc.get_worker_info().name, module(x), module


def sharing():
    here, there = Network(13), rpc.RemoteModule("worker1", Network, (13,))
    here.eval(), there.eval()
    x = inputs(3)
    name, y, back = rpc.rpc_sync("worker2", use, args=(there, x))
    here.scale[...] = here.scale[...] + 1
    assert name == "worker2"
    assert same(y, here(x))
    assert isinstance(back, rpc.RemoteModule)
    assert back.module_rref.owner_name() == "worker1"
    assert same(back(x), here(x))
    del there, back
    (first, _) = rpc.rpc_sync("worker1", at_home, args=(x,))
    assert same(first(x), here_of(14)(x))
    assert repr(first).startswith("RemoteModule(UserRRef(")


def here_of(seed):
    module = Network(seed)
    module.eval()
    return module


def at_home(x):
    """On its owner it is the object itself."""
    module = rpc.RemoteModule(rpc.get_worker_info(), Network, (14,)).eval()
    assert module.module_rref.is_owner()
    local = module.module_rref.local_value()
    assert same(module(x), local(x))
    cell = module.parameters()["scale"].local_value()
    assert same(cell.value, local.scale[...])
    return module, local.scale.shape


def test_it_travels_as_its_reference(cluster):
    cluster.run(0, sharing)


def owned():
    return int(rpc.debug_info()["num_owner_rrefs"])


def living():
    assert rpc.rpc_sync("worker3", owned) == 0
    there = rpc.RemoteModule("worker3", module_cases.shared_layer, (15,))
    bias = there.parameters()["bias"]
    wait_until(lambda: rpc.rpc_sync("worker3", owned) == 2)
    del there
    gc.collect()
    wait_until(lambda: rpc.rpc_sync("worker3", owned) == 1)
    assert bias.to_here().value.shape == (4,)
    del bias
    gc.collect()
    wait_until(lambda: rpc.rpc_sync("worker3", owned) == 0)


def test_it_lives_as_long_as_somebody_uses_it(cluster):
    """A parameter outlives its module, and nothing is left in the end."""
    cluster.run(0, living)


def place(rref):
    kernel = rref.local_value().kernel[...]
    return [device.id for device in kernel.devices()]


def test_its_arrays_are_on_the_worker_s_device():
    """Also after a value came from elsewhere."""
    devices = jax.devices("cpu")[3:5]
    with rpc.local_cluster(["here", "there"], devices=devices, allow=["tests"]):
        module = rpc.RemoteModule("there", module_cases.shared_layer, (16,))
        where = (place, (module.module_rref,))
        assert rpc.rpc_sync("there", *where) == [devices[1].id]
        y = module(jax.device_put(inputs(), devices[0]))
        assert y.devices() == {devices[0]}
        kernel = module.parameters()["kernel"]
        kernel.rpc_sync().set(jnp.zeros((5, 4), "float32"))
        assert rpc.rpc_sync("there", *where) == [devices[1].id]


def test_rpc_does_not_import_flax():
    """Not at import, and not by a module that is no module of Flax."""
    program = (
        "import sys; from jdist import rpc\n"
        "with rpc.local_cluster(['a', 'b']):\n"
        "    rpc.RemoteModule('b', list, args=((3, 1),)).rpc_sync().sort()\n"
        "assert not [name for name in sys.modules if name.startswith('flax')]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
