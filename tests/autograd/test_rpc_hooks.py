"""Values that cross between workers: arguments, results, references, placement."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.recording.variable import LeafNode
from tests.autograd.recording_cases import (
    WAYS,
    Model,
    add,
    call,
    current,
    described,
    echo,
    get_own,
    has_none,
    kinds,
    later,
    leaf,
    mul,
    name,
    numbers,
    own,
    parts,
    power,
    records,
    sees_arrays,
    which,
)


def settled():
    assert has_none()


@pytest.fixture(autouse=True)
def _clean(cluster):
    yield
    cluster.everywhere(settled)


def outputs(way):
    x = leaf(1)
    with autograd.context():
        out = call(way, name(1), parts, x)
        (result, total) = out
        assert isinstance(result["double"], autograd.Recorded)
        np.testing.assert_array_equal(result["double"].value, x.value * 2)
        np.testing.assert_allclose(total.value, x.value.sum())
        assert (result["whole"].dtype, int(result["whole"])) == (jnp.int32, 7)
        np.testing.assert_array_equal(result["plain"], np.zeros(3))
        edges = [result["double"].edge, total.edge]
        assert edges[0].node is edges[1].node
        _, (recv,) = current()
        return [edge.index for edge in edges], recv.outputs


@pytest.mark.parametrize("way", WAYS)
def test_a_tree_of_outputs(cluster, way):
    """Only what depends on the arguments is recorded; each has a slot of its own."""
    assert cluster.run(0, outputs, way) == ([0, 1], 2)


def integers(way):
    x = leaf(1)
    with autograd.context():
        out = call(way, name(1), power, x, 3, scale=2.5)
        sends, _ = current()
        np.testing.assert_allclose(out.value, 2.5 * np.asarray(x.value) ** 3)
        return len(sends[0].inputs)


@pytest.mark.parametrize("way", WAYS)
def test_integers_and_numbers_among_the_arguments(cluster, way):
    assert cluster.run(1, integers, way) == 1


def dtypes(way):
    kinds = (jnp.float32, jnp.float64, jnp.bfloat16, jnp.complex64)
    tree = [jnp.asarray(numbers(k), kind) for k, kind in enumerate(kinds)]
    w = autograd.variable({"floating": tree, "whole": np.arange(4)})
    with autograd.context():
        out = call(way, name(1), doubled, w)
        found = [(str(x.dtype), type(x).__name__) for x in out["floating"]]
        for x, given in zip(out["floating"], tree, strict=True):
            np.testing.assert_array_equal(x.value, given + given)
        assert out["whole"].tolist() == [0, 2, 4, 6]
        (send,), (recv,) = current()
        assert [edge.index for edge in send.inputs] == [0, 1, 2, 3]
        assert recv.outputs == 4
        return found


def doubled(tree):
    return jax.tree.map(lambda x: x + x, tree)


@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_and_a_tree_as_variable(cluster, way):
    names = ("float32", "float64", "bfloat16", "complex64")
    found = cluster.run(0, dtypes, way)
    assert found == [(kind, "Recorded") for kind in names]


def what_is_seen(way):
    x = leaf(1)
    with autograd.context():
        call(way, name(1), sees_arrays, x, x)
        return call(way, name(1), kinds, x, x * 2.0, numbers(1), jnp.ones(2), {"v": x})


@pytest.mark.parametrize("way", WAYS)
def test_an_eager_function_sees_recorded_values(cluster, way):
    seen = cluster.run(0, what_is_seen, way)
    assert seen == ["Recorded", "Recorded", "ndarray", "ArrayImpl", "dict"]


def passed_through(way):
    x = leaf(1)
    with autograd.context() as context_id:
        out = call(way, name(1), echo, {"x": x, "n": 5})
        assert out["n"] == 5
        sends, _ = rpc.rpc_sync(name(1), records, args=(context_id,))
        return sends


@pytest.mark.parametrize("way", WAYS)
def test_what_passes_through_keeps_its_history(cluster, way):
    sends = cluster.run(0, passed_through, way)
    assert sends == [("worker0", [("receive", "worker0", 0)])]


def branches(way, recorded):
    x, y = leaf(1), leaf(2) if recorded else numbers(2)
    with autograd.context():
        out = call(way, name(1), which, recorded, x, y)
        factor = 1.0 if recorded else 3.0
        want = x.value * getattr(y, "value", y) * factor
        np.testing.assert_allclose(out.value, want)
        sends, _ = current()
        made_of = [edge.node.variable for edge in sends[0].inputs]
        return [any(one is given for given in (x, y)) for one in made_of]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recorded", [True, False])
def test_whether_it_is_recorded_crosses_too(cluster, way, recorded):
    """torch: test_mixed_requires_grad."""
    assert cluster.run(2, branches, way, recorded) == [True] * (1 + recorded)


def without_context(way):
    x = leaf(1)
    out = call(way, name(1), add, x, x * 2.0)
    assert not isinstance(out, autograd.Recorded)
    np.testing.assert_allclose(out, np.asarray(x.value) * 3.0)
    own_one = call(way, name(1), get_own, 12)
    assert isinstance(own_one, jax.Array)
    return call(way, name(1), kinds, x, (x * 2.0))


@pytest.mark.parametrize("way", WAYS)
def test_outside_of_a_context_functions_simply_run(cluster, way):
    assert cluster.run(0, without_context, way) == ["ArrayImpl", "ArrayImpl"]


def deferred(way):
    x, y = leaf(1), leaf(2)
    with autograd.context() as context_id:
        out = call(way, name(1), later, name(2), x, y)
        np.testing.assert_allclose(out.value, x.value * y.value + x.value)
        assert [len(found) for found in current()] == [1, 1]
        sends, _ = rpc.rpc_sync(name(1), records, args=(context_id,))
        return sends


@pytest.mark.parametrize("way", WAYS)
def test_async_execution(cluster, way):
    """Its future is completed on another thread, in the same context."""
    onward, back = cluster.run(0, deferred, way)
    received = [("receive", "worker0", 0), ("receive", "worker0", 1)]
    assert onward == ("worker2", received)
    assert back == (
        "worker0",
        [("add", 0, [("receive", "worker2", 0), ("receive", "worker0", 0)])],
    )


# --- references ---


def to_variable():
    rref = rpc.remote(name(1), autograd.variable, args=(numbers(3),))
    plain = rref.to_here()
    with autograd.context() as context_id:
        here = rref.to_here()
        again = rref.to_here()
        np.testing.assert_array_equal(here.value, plain)
        assert here.edge.node is not again.edge.node
        sends, recvs = current()
        there = rpc.rpc_sync(name(1), records, args=(context_id,))
        leaf = rpc.rpc_sync(name(1), leads_to, args=(context_id, rref))
        return type(plain).__name__, len(sends), len(recvs), there, leaf


def leads_to(context_id, rref):
    """Whether the sends of this worker lead to the variable of the reference."""
    sends = autograd.retrieve_context(context_id).send_functions().values()
    nodes = [edge.node for send in sends for edge in send.inputs]
    assert all(isinstance(node, LeafNode) for node in nodes)
    return [node.variable is rref.local_value() for node in nodes]


def test_a_reference_to_a_variable(cluster):
    """`to_here` within a context is recorded on both sides, each time anew."""
    kind, sends, recvs, there, leaf = cluster.run(0, to_variable)
    assert (kind, sends, recvs) == ("ArrayImpl", 0, 2)
    assert there == ([("worker0", [("leaf", 0)])] * 2, [])
    assert leaf == [True, True]


def to_variable_at_home():
    """On its owner: what another worker would get."""
    variable = autograd.variable(numbers(3))
    rref, listed = rpc.RRef(variable), rpc.RRef([variable])
    plain = rref.to_here()
    assert isinstance(plain, jax.Array)
    assert plain is variable.value
    with autograd.context():
        here = rref.to_here()
        assert isinstance(here, autograd.Recorded)
        assert here.edge == (variable.node, 0)
        assert rpc.rpc_sync(name(0), kinds, args=(here,)) == ["Recorded"]
        # What it is in stays what it is.
        assert listed.to_here()[0] is variable
    assert rref.local_value() is variable


def test_a_variable_of_one_s_own(cluster):
    cluster.run(0, to_variable_at_home)


def gradients_by_name():
    w = leaf(1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(w * w).sum()])
        found = autograd.get_gradients(context_id)
        for keyed in (found, dict(found), {w}, {w * 2.0: 1}):
            with pytest.raises(
                TypeError, match=r"must have no (Variable|Recorded) as a k"
            ):
                rpc.rpc_sync(name(1), len, args=(keyed,))
        named = rpc.rpc_sync(name(1), itself, args=({"w": found[w]},))
        np.testing.assert_array_equal(named["w"], 2 * numbers(1))
        (back,) = rpc.rpc_sync(name(1), itself, args=({rpc.RRef(w): found[w]},))
        assert back.local_value() is w


def itself(value):
    return value


def test_gradients_travel_under_names(cluster):
    """A variable arrives as its arrays, and so is no key."""
    cluster.run(0, gradients_by_name)


class Averages:
    """Keeps what it computes from what it is sent, from context to context."""

    def __init__(self):
        self.w, self.mean = autograd.variable(numbers(4)), jnp.zeros(())

    def __call__(self, x):
        y, self.mean = autograd.apply(averaged, self.w, self.mean, x)
        return y

    def average(self):
        return self.mean


def averaged(w, mean, x):
    return w * x, mean + jax.lax.stop_gradient(x.mean())


def step_by_step():
    model, v = rpc.remote(name(1), Averages), leaf(1)
    for _ in range(3):
        with autograd.context() as context_id:
            loss = model.rpc_sync()(v * 2.0).sum()
            autograd.backward(context_id, [loss])
            gradient = autograd.get_gradients(context_id)[v]
        np.testing.assert_allclose(gradient, 2 * numbers(4), rtol=1e-12)
    mean = model.rpc_sync().average()
    np.testing.assert_allclose(mean, 3 * 2 * numbers(1).mean(), rtol=1e-12)


def test_what_gradients_do_not_reach_does_not_tie_contexts_together(cluster):
    cluster.run(0, step_by_step)


def before_the_context():
    """torch: test_thread_local_context_id."""
    rref = rpc.remote(name(1), slow_variable, args=(numbers(1), numbers(2)))
    with autograd.context() as context_id:
        here = rref.to_here()
        np.testing.assert_array_equal(here.value, numbers(1) + numbers(2))
        return rpc.rpc_sync(name(1), leads_to, args=(context_id, rref))


def slow_variable(x, y):
    return autograd.variable(x + y)


def test_a_reference_that_is_older_than_the_context(cluster):
    assert cluster.run(3, before_the_context) == [True]


def through_references(callee, owner):
    """The callee adds what it fetches from the owner to what the caller gives."""
    rref = rpc.remote(owner, autograd.variable, args=(numbers(5),))
    t2 = leaf(6)
    with autograd.context() as context_id:
        out = rpc.remote(callee, fetch_and_add, args=(rref, t2)).to_here()
        np.testing.assert_array_equal(out.value, numbers(5) + numbers(6))
        sends, _ = current()
        assert [edge.node.variable for edge in sends[0].inputs] == [t2]
        return rpc.rpc_sync(owner, leads_to_variable, args=(context_id, rref))


@autograd.eager
def fetch_and_add(rref, x):
    return autograd.apply(add, rref.to_here(), x)


def leads_to_variable(context_id, rref):
    sends = autograd.retrieve_context(context_id).send_functions().values()
    found = [edge.node for send in sends for edge in send.inputs]
    return rref.local_value() in [getattr(node, "variable", None) for node in found]


@pytest.mark.parametrize("steps", [1, 2])
def test_references_as_arguments(cluster, steps):
    """torch: test_backward_rref and test_backward_rref_nested (the forward part)."""
    if steps == 2:
        assert cluster.run(0, through_references, "worker1", "worker2")
        return
    # The callee is the owner: nothing crosses but the sum.
    assert cluster.run(0, kept_by_the_callee) == ["add"]


def kept_by_the_callee():
    rref = rpc.remote(name(1), autograd.variable, args=(numbers(5),))
    with autograd.context() as context_id:
        out = rpc.remote(name(1), fetch_and_add, args=(rref, leaf(6)))
        out.to_here()
        sends, _ = rpc.rpc_sync(name(1), records, args=(context_id,))
        return [edges[0][0] for _, edges in sends]


def recorded_results_stay():
    x = leaf(1)
    with autograd.context() as context_id:
        product = rpc.remote(name(1), mul, args=(x, numbers(2)))
        total = rpc.remote(name(1), fetch_and_add, args=(product, x))
        out = total.to_here()
        np.testing.assert_allclose(out.value, x.value * numbers(2) + x.value)
        (send, _), (recv,) = current()
        assert out.edge.node is recv
        there, _ = rpc.rpc_sync(name(1), records, args=(context_id,))
        assert send.inputs[0].node.variable is x
        return there


def test_recorded_results_stay_with_their_owner(cluster):
    """A chain of references: only its end crosses."""
    first = ("mul", 0, [("receive", "worker0", 0), None])
    total = ("add", 0, [first, ("receive", "worker0", 0)])
    assert cluster.run(0, recorded_results_stay) == [("worker0", [total])]


def methods():
    model = rpc.remote(name(1), Model, args=(7,))
    x = leaf(1)
    with autograd.context() as context_id:
        out = model.rpc_sync().forward(x)
        np.testing.assert_allclose(out.value, x.value @ numbers(7, (4, 2)))
        same = [
            model.rpc_async().forward(x).wait(),
            model.remote().forward(x).to_here(),
            model.rpc_sync()(x),
        ]
        for other in same:
            np.testing.assert_array_equal(other.value, out.value)
        there, _ = rpc.rpc_sync(name(1), records, args=(context_id,))
        variable = model.rpc_sync().variable().to_here()
        np.testing.assert_array_equal(variable.value, numbers(7, (4, 2)))
        return there


def test_methods_of_a_value_see_its_variables(cluster):
    product = ("matmul", 0, [("receive", "worker0", 0), ("leaf", 0)])
    assert cluster.run(0, methods) == [("worker0", [product])] * 4


def hidden_variable():
    with autograd.context(), pytest.raises(TypeError, match=r"@autograd\.eager"):
        rpc.rpc_sync(name(1), uses_its_own, args=(leaf(1),))
    with autograd.context():
        out = rpc.rpc_sync(name(1), uses_its_own, args=(numbers(1),))
        assert not isinstance(out, autograd.Recorded)
        return rpc.rpc_sync(name(1), uses_its_own_eagerly, args=(leaf(1),)).shape


def uses_its_own(x):
    return x * own(13).value


@autograd.eager
def uses_its_own_eagerly(x):
    return x * own(13)


def test_a_pure_function_must_not_use_variables_of_its_own(cluster):
    """They would silently get no gradient."""
    assert cluster.run(0, hidden_variable) == (3, 4)


# --- placement and memory ---


def test_values_are_on_the_device_of_the_worker_that_has_them(threads):
    devices = jax.devices()
    x = autograd.variable(jax.device_put(numbers(1), devices[0]))
    with autograd.context():
        there = rpc.remote("worker2", add, args=(x, x))
        assert there.to_here().value.devices() == {devices[0]}
        held = rpc.rpc_sync("worker2", device_of, args=(there,))
    assert held == str(devices[2])


def device_of(rref):
    (device,) = rref.local_value().value.devices()
    return str(device)


def forgets():
    """Neither values nor residuals outlive their context and their variables."""
    x = leaf(1)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(name(1), mul, args=(x * 2.0, x))
        context = autograd.current_context()
        (send,), (recv,) = current()
        kept = [weakref.ref(thing) for thing in (x, context, send, recv)]
        kept.append(weakref.ref(send.inputs[0].node))
        rpc.rpc_sync(name(1), watch, args=(context_id,))
        ended = context.release()
        ended.wait(30.0)
        del context, send, recv
    del x, y
    gc.collect()
    return [thing() for thing in kept], rpc.rpc_sync(name(1), watched)


_watched = []


def watch(context_id):
    context = autograd.retrieve_context(context_id)
    sends, recvs = context.send_functions(), context.recv_functions()
    things = [context, *sends.values(), *recvs.values()]
    things += [edge.node for send in sends.values() for edge in send.inputs]
    assert len(things) == 4
    _watched[:] = [weakref.ref(thing) for thing in things]


def watched():
    gc.collect()
    return [thing() is None for thing in _watched]


def test_nothing_is_kept_after_the_release(cluster):
    assert cluster.run(0, forgets) == ([None] * 5, [True] * 4)


def late_answer():
    """An answer that comes after the end of its context leads nowhere, and says so."""
    with autograd.context() as context_id:
        future = rpc.rpc_async(name(1), mul, args=(leaf(1), numbers(2)))
        autograd.retrieve_context(context_id).release()
    try:
        value = future.wait(30.0)
    except autograd.ContextNotFound as error:
        return str(error).split(".")[0] == _gone(context_id)
    return described(value.edge)[0] == "receive"


def _gone(context_id):
    return f"Could not find autograd context with id: {context_id}"


def test_an_answer_after_the_end(cluster):
    for _ in range(20):
        assert cluster.run(0, late_answer)


@autograd.eager
def looks(x):
    """What a user's function finds, of a small array of 32 bits too."""
    return x * 2, type(x.value) is type(jnp.ones(1)), x.value.tolist()


def sees(seen):
    x = leaf(1, shape=(2, 2), dtype=np.float32)
    x.register_hook(lambda gradient: seen.append(gradient))
    with autograd.context() as context_id:
        y, is_jax, values = rpc.rpc_sync(name(1), looks, args=(x,))
        assert is_jax
        assert values == x.value.tolist()
        assert isinstance(y.value, jax.Array)
        z = rpc.rpc_sync(name(1), add, args=(y, x))
        autograd.backward(context_id, [z.sum()])
        found = autograd.get_gradients(context_id)[x]
    assert all(isinstance(one, jax.Array) for one in (*seen, found, z.value))
    assert found.tolist() == [[3, 3], [3, 3]]
    return len(seen)


def test_users_code_sees_arrays_of_jax(cluster):
    """However they travelled."""
    assert cluster.run(0, sees, []) == 1
