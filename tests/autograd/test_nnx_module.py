"""Training Flax NNX modules: parameters and state are updated, and nothing leaks."""

import gc
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import autograd, optim, rpc
from jdist.rpc.base import current
from jdist.rpc.base.current import NEVER, resolve
from tests.autograd import nnx_cases as cases
from tests.autograd.nnx_cases import Body, Head
from tests.autograd.recording_cases import contexts, has_none
from tests.rpc.rref.common import settle, wait_for
from tests.rpc.sockets import Outcome

pytestmark = pytest.mark.compiled

FACTOR = 2.0
CALLED = "/jdist/tests/module_is_traced"
COMPILED = "backend_compile_duration"
traced, compiled = [], []
jax.monitoring.register_event_listener(
    lambda event, **_: traced.append(event) if event == CALLED else None
)
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if COMPILED in event else None
)


def rows(seed=0, count=4):
    return np.random.default_rng(seed).normal(size=(count, 5))


# --- training ---


def train_remotely():
    body = rpc.RemoteModule("worker1", Body, (3,), trainable=True)
    head = rpc.RemoteModule("worker2", Head, kwargs={"seed": 4}, trainable=True)
    assert list(body.parameters()) == [
        "again.bias", "again.kernel", "first.bias", "first.kernel",
        "idle.bias", "idle.kernel", "norm.bias", "norm.scale",
    ]  # fmt: skip
    assert list(head.parameters()) == ["out.bias", "out.kernel"]
    found = cases.trained(
        body, head, body.remote_parameters() + head.remote_parameters()
    )
    states = [numbers(each.rpc_sync().state()) for each in (body, head)]
    return found, states


def train_locally():
    body, head = autograd.TrainableModule(Body(3)), autograd.TrainableModule(Head(4))
    variables = [*body.parameters().values(), *head.parameters().values()]
    found = cases.trained(body, head, [rpc.RRef(each) for each in variables])
    return found, [numbers(each.state()) for each in (body, head)]


def numbers(state):
    return {path: np.asarray(plain(leaf)) for path, leaf in state.items()}


def plain(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.fixture(scope="module")
def alone():
    """The same on one worker, and by `jax.value_and_grad` of the whole."""
    with rpc.local_cluster(["alone"], allow=["tests"]):
        found = train_locally()
    return found, cases.on_one_device(Body(3), Head(4))


def test_training_is_that_of_one_device(alone, cluster):
    """Losses, gradients, parameters and statistics, with noise, over two workers.

    Bit for bit those of the same modules on one worker, and but for rounding those of
    `jax.value_and_grad` of the whole.
    """
    found, states = cluster.run(0, train_remotely)
    here, (expected, models) = alone
    same_bits((found, states), here)
    for one, other in zip(found, expected, strict=True):
        for leaf, right in zip(leaves(one), leaves(other), strict=True):
            assert (leaf is None) == (right is None)
            if leaf is not None:
                np.testing.assert_allclose(leaf, right, rtol=1e-12, atol=1e-14)
    assert [g is None for g in found[0][1]] == [i in (4, 5) for i in range(10)]
    assert not np.allclose(found[0][2][0], found[1][2][0])
    for state, model in zip(states, models, strict=True):
        moved = autograd.TrainableModule(model).state()
        assert list(state) == list(moved)
        for path, leaf in numbers(moved).items():
            np.testing.assert_allclose(state[path], leaf, rtol=1e-12, err_msg=path)
    assert states[0]["drop.rngs.count"] == states[1]["drop.rngs.count"] == cases.STEPS
    assert all(cluster.everywhere(has_none))
    settle(cluster)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(leaves(one), leaves(other), strict=True):
        if left is not None:
            np.testing.assert_array_equal(left, right, strict=True)


def without_a_recorded_argument():
    layer = rpc.RemoteModule("worker1", Body, (3,), trainable=True)
    outside = layer(rows())
    with autograd.context() as context_id:
        within = [layer(rows()), layer.rpc_async()(rows()).wait()]
        within.append(layer.remote()(rows()).to_here())
        autograd.backward(context_id, [y.sum() for y in within])
    return [type(y).__name__ for y in (outside, *within)]


def test_calls_are_recorded_within_a_context(threads):
    """Whatever the arguments are; outside of one arrays come back."""
    assert (
        threads.run(0, without_a_recorded_argument) == ["ArrayImpl"] + ["Recorded"] * 3
    )


def test_a_module_goes_when_nothing_refers_to_it(threads):
    before = modules_here()
    body = rpc.RemoteModule("worker1", Body, (3,), trainable=True)
    head = rpc.RemoteModule("worker2", Head, (3,), trainable=True)
    with autograd.context() as context_id:
        loss = head(body(rows())).sum()
        autograd.backward(context_id, [loss])
    made = [each for each in modules_here() if each not in before]
    assert len(made) == 2
    held = [weakref.ref(x) for one in made for x in (one, *one.parameters().values())]
    assert len(held) == 12
    del body, head, loss, made, before
    settle(threads)
    # The thread that did the last call lets go of its arguments after the answer.
    assert wait_for(lambda: gone(held)), [each() for each in held]
    assert contexts() == 0


def gone(held):
    gc.collect()
    return all(each() is None for each in held)


def modules_here():
    return [
        each for each in gc.get_objects() if isinstance(each, autograd.TrainableModule)
    ]


# --- state ---


def test_statistics_and_noise_go_on():
    module, twin = autograd.TrainableModule(Body(3)), Body(3)
    run = nnx.jit(lambda module, x: module(x))
    found = [module(rows(k)) for k in range(3)]
    for k, y in enumerate(found):
        np.testing.assert_allclose(y.value, run(twin, rows(k)), rtol=1e-12, atol=1e-14)
    back = module.to_nnx()
    np.testing.assert_allclose(back.norm.mean[...], twin.norm.mean[...], rtol=1e-12)
    assert back.drop.rngs.count[...] == twin.drop.rngs.count[...] == 3
    assert back.again is back.twice
    for mode in ("eval", "train"):
        for each in (module, twin, back):
            getattr(each, mode)()
        expected = run(twin, rows(7))
        np.testing.assert_allclose(module(rows(7)).value, expected, rtol=1e-12)
        np.testing.assert_allclose(run(back, rows(7)), expected, rtol=1e-12)
    assert not any(isinstance(x, autograd.Recorded) for x in module.state().values())


def test_the_original_is_left_alone():
    original = Body(3)
    module = autograd.TrainableModule(original, key=jax.random.key(5))
    module(rows())
    assert original.drop.rngs.count[...] == 0
    assert not np.any(original.norm.mean[...])
    assert module.state()["drop.rngs.count"] == 1


class Noise(nnx.Module):
    """Two streams; the noise of both is in the result."""

    def __init__(self, rngs):
        self.one = nnx.Dropout(0.5, rngs=rngs)
        self.other = nnx.Dropout(0.5, rngs=rngs.fork())

    def __call__(self, x):
        return jnp.stack([self.one(x), self.other(x)])


def test_a_key_begins_all_streams_anew():
    used = Noise(nnx.Rngs(1))
    used(jnp.ones(3))
    x = jnp.asarray(rows(1, 30))

    def masks(key, calls=2):
        module = autograd.TrainableModule(used, key=key)
        return [np.asarray(module(x)) != 0 for _ in range(calls)]

    first, second = masks(jax.random.key(1))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(masks(jax.random.key(1))[0], first)
    assert not np.array_equal(masks(jax.random.key(2))[0], first)
    np.testing.assert_array_equal(masks(None)[0], np.asarray(used(x)) != 0)


def test_state_is_kept_and_put_back():
    """With the parameters it is all there is to resume from."""
    module, other = autograd.TrainableModule(Body(3)), autograd.TrainableModule(Body(8))
    module(rows())
    other.load_state(module.state())
    for path, variable in other.parameters().items():
        variable.value = module.parameters()[path].value
    same_bits(module(rows(1)).value, other(rows(1)).value)
    state = module.state()
    wrong = {**state, "norm.mean": jnp.zeros(6)}
    with pytest.raises(ValueError, match=r"float64\[7\] at norm\.mean.*Got float64\[6"):
        module.load_state(wrong)
    del state["drop.rngs.key"]
    with pytest.raises(ValueError, match=r"key<fry>\[\] at drop\.rngs\.key.*Got no le"):
        module.load_state(state)
    with pytest.raises(ValueError, match=r"must have no leaf at more, as the module"):
        module.load_state({**module.state(), "more": 1.0})


class Moody(nnx.Module):
    """Fails for two rows, after its statistics have moved."""

    def __init__(self):
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.norm(x)
        if len(x) == 2:
            raise ValueError("two rows on purpose")
        return y


def test_a_call_that_fails_leaves_the_state():
    module = autograd.TrainableModule(Moody())
    module(jnp.asarray(rows(), "float32"))
    before = numbers(module.state())
    with pytest.raises(ValueError, match="two rows on purpose"):
        module(jnp.asarray(rows(1, 2), "float32"))
    same_bits(numbers(module.state()), before)


def test_calls_at_the_same_time_draw_different_noise(threads):
    layer = rpc.RemoteModule("worker1", Head, (3,), trainable=True)
    x = np.random.default_rng(0).normal(size=(6, 7))
    found = rpc.wait_all([layer.rpc_async()(x) for _ in range(12)])
    assert layer.rpc_sync().state()["drop.rngs.count"] == 12
    assert len({np.asarray(y).tobytes() for y in found}) == 12


def test_a_call_waits_for_its_turn_no_longer_than_it_may(threads):
    module, soon = autograd.TrainableModule(Head(3)), resolve(0.05, 0, NEVER)
    before = module.state()
    taken, done = threading.Event(), threading.Event()

    def other():
        def hold():
            module._lock.acquire(None, "busy")
            taken.set()
            assert done.wait(60)

        module._lock.releasing(hold)

    holder = Outcome(other)
    assert taken.wait(60)
    token = current.scope.set(current.Scope(current.worker(), soon))
    try:
        waiting = "while other calls had the state of Head"
        with pytest.raises(rpc.RpcTimeout, match=waiting):
            module(np.ones((2, 7)))
    finally:
        current.scope.reset(token)
        done.set()
    holder.get()
    same_bits(numbers(module.state()), numbers(before))
    assert module(np.ones((2, 7))).shape == (2, 2)


# --- compiling ---


class Counted(nnx.Module):
    """Tells when it is traced; computes with a global."""

    def __init__(self):
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
        self.factor = nnx.Param(jnp.float32(1.5))
        self.settings = {"by": 3.0}

    def __call__(self, x):
        jax.monitoring.record_event(CALLED)
        y = self.norm(x.astype(jnp.float32))
        return y * FACTOR * self.settings["by"] * self.factor[...]


def test_it_is_traced_once_for_each_mode():
    module = autograd.TrainableModule(Counted())
    traced.clear()
    for _ in range(2):
        for mode in (module.train, module.eval):
            mode()
            module(rows()), module(rows(1))
    assert len(traced) == 2


@pytest.mark.parametrize("what", ["a global", "an attribute's contents"])
def test_what_the_module_reads_may_change(monkeypatch, what):
    original = Counted()
    module = autograd.TrainableModule(original)
    module.eval()
    first = module(rows()).value
    if what == "a global":
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    else:
        original.settings["by"] = 7.5
    np.testing.assert_allclose(module(rows()).value, 2.5 * first, rtol=1e-6)
    module.train()
    module.eval()
    np.testing.assert_allclose(module(rows()).value, 2.5 * first, rtol=1e-6)


def test_a_step_is_compiled_once(threads):
    """What a module begins with is bound to its device, as what it is given is."""
    head = rpc.RemoteModule("worker1", Head, (3,), trainable=True)
    opt = autograd.DistributedOptimizer(optim.sgd, head.remote_parameters(), lr=0.1)
    before = [len(compiled)]
    for _ in range(3):
        with autograd.context() as context_id:
            loss = (head(np.ones((5, 7))) ** 2).sum()
            autograd.backward(context_id, [loss])
            opt.step(context_id)
        before.append(len(compiled))
    assert before[0] < before[1] == before[2] == before[3]


# --- what a call must not do ---


class Changing(nnx.Module):
    """Changes something of itself."""

    def __init__(self, what):
        self.what = what
        self.w = nnx.Param(jnp.ones(5, jnp.float64))
        self.calls = 0

    def __call__(self, x):
        if self.what == "parameter":
            self.w[...] = self.w[...] * 2
        elif self.what == "attribute":
            self.calls += 1
        else:
            self.seen = nnx.Intermediate(x)
        return x * self.w[...][None]


@pytest.mark.parametrize(
    ("what", "changed"),
    [("parameter", "w"), ("attribute", ".*calls.*"), ("variable", "seen")],
)
def test_what_would_be_lost_is_refused(what, changed):
    module = autograd.TrainableModule(Changing(what))
    told = (
        r"`TrainableModule\(Changing\)` must change nothing but its state in a call\. "
        rf"Got a change of {changed}\. Return what the call computes"
    )
    with pytest.raises(TypeError, match=told):
        module(rows())


def test_it_is_no_part_of_a_pure_function():
    module = autograd.TrainableModule(Body(3))
    with pytest.raises(TypeError, match="a call of the module Body"):
        autograd.apply(lambda x: module(x), autograd.variable(rows()))


# --- methods ---


def call_methods():
    layer = rpc.RemoteModule("worker1", Body, (3,), trainable=True)
    here, x = autograd.TrainableModule(Body(3)), rows()
    expected = Body(3).encode(x, 2.0)["h"]
    with autograd.context() as context_id:
        found = [layer.rpc_sync().encode(x, 2.0), here.method("encode")(x, scale=2.0)]
        for each in found:
            assert isinstance(each["h"], autograd.Recorded)
            assert each["rows"] == 4
            np.testing.assert_allclose(each["h"].value, expected, rtol=1e-12)
        autograd.backward(context_id, [found[0]["h"].sum()])
    calls = layer.rpc_sync()
    for name, kind, text in [
        ("set_attributes", rpc.ForbiddenFunction, "must be defined in a module that"),
        ("first", AttributeError, "'Body' object has no attribute 'first'"),
        ("absent", AttributeError, "'Body' object has no attribute 'absent'"),
    ]:
        with pytest.raises(kind, match=text):
            getattr(calls, name)()
    with pytest.raises(AttributeError, match="'Body' object has no method 'absent'"):
        here.method("absent")


def test_methods_of_the_module_are_recorded(threads):
    """What others may call is what they may call of the module itself."""
    threads.run(0, call_methods)


# --- what is refused ---


def test_only_modules_and_keys():
    for wrong in (jnp.ones(3), Body, lambda x: x, {"w": 1.0}):
        with pytest.raises(
            TypeError, match=r"`TrainableModule\(nnx_module\)` must be a Flax NN"
        ):
            autograd.TrainableModule(wrong)
    for wrong in (3, nnx.Rngs(0), jnp.ones(2)):
        with pytest.raises(
            TypeError, match=r"`TrainableModule\(key=...\)` must be a PRNG key"
        ):
            autograd.TrainableModule(Body(3), key=wrong)


def refused():
    with pytest.raises(TypeError, match=r"must be a Flax NNX module\. Got a list"):
        rpc.RemoteModule("worker1", list, trainable=True)
    fixed = rpc.RemoteModule("worker1", Head, (3,))
    remedy = r"RemoteModule\(.*trainable=True\)"
    with autograd.context(), pytest.raises(TypeError, match=f"a Head that .*{remedy}"):
        fixed(autograd.variable(np.ones((2, 7))))
    with pytest.raises(ExceptionGroup, match=f"Got a Parameter. .*{remedy}"):
        autograd.DistributedOptimizer(optim.sgd, fixed.remote_parameters(), lr=0.1)
    moved = rpc.RemoteModule("worker1", Head, (3,), trainable=True)
    with pytest.raises(
        TypeError, match=r"Got RemoteM.* `module\.remote_parameters\(\)"
    ):
        autograd.DistributedOptimizer(optim.sgd, [moved], lr=0.1)
    with pytest.raises(
        ExceptionGroup, match=r"Got a TrainableModule\. .*parameters\(\)\.values"
    ):
        autograd.DistributedOptimizer(optim.sgd, [moved.module_rref], lr=0.1)


def test_what_cannot_be_trained_says_how_it_can(threads):
    threads.run(0, refused)


def test_training_needs_autograd():
    program = (
        "from jdist import rpc\n"
        "with rpc.local_cluster(['a']):\n"
        "    try: rpc.RemoteModule('a', list, trainable=True)\n"
        "    except rpc.RpcError as e: assert 'a part of jdist.autograd' in str(e)\n"
        "    else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_it_is_on_its_worker_s_device():
    devices = jax.devices("cpu")[3:5]
    with rpc.local_cluster(["here", "there"], devices=devices, allow=["tests"]):
        layer = rpc.RemoteModule("there", Head, (3,), trainable=True)
        bias = layer.parameters()["out.bias"]
        with autograd.context() as context_id:
            y = layer(np.ones((2, 7)))
            assert y.value.devices() == {devices[0]}
            autograd.backward(context_id, [y.sum()])
            with rpc.use_worker("there"):
                (gradient,) = (
                    g
                    for w, g in autograd.get_gradients(context_id).items()
                    if g.shape == (2,)
                )
            assert gradient.devices() == {devices[1]}
        assert bias.to_here().devices() == {devices[0]}
