"""Errors in a remote call: their text, their remedy, and the calls that follow."""

import contextlib
import functools
import signal

import jax
import jax.numpy as jnp
import pytest

from jdist import autograd, rpc
from tests.autograd import remote_functions as functions
from tests.rpc.hosts import become_worker

on_worker1 = functools.partial(functools.partial, autograd.remote_call, "worker1")
JaxError = jax.errors.JaxRuntimeError
X = jnp.array([0.5, -1.5, 2.0])


def total(function):
    return lambda x: on_worker1(function)(x).sum()


# --- transformations that are refused ---


FORWARD = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "jit of jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,))),
    "jvp of jit": lambda f: lambda x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jvp of vmap": lambda f: lambda x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "jacfwd": jax.jacfwd,
    "jacfwd of grad": lambda f: jax.jacfwd(jax.grad(jax.jit(f))),
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_says_to_use_jacrev(threads, name):
    rule = r"remote_call\('worker1', loss\)` must be differentiated in reverse mode.*"
    with pytest.raises(TypeError, match=f"{rule}jax.jacrev"):
        FORWARD[name](total(functions.loss))(X)


@pytest.mark.parametrize("jit", [False, True])
def test_checkpoint_says_to_leave_it_out(threads, jit):
    gradient = jax.grad(jax.checkpoint(total(functions.loss)))
    match = "autograd.remote_call.*Leave it out of jax.checkpoint"
    with pytest.raises(NotImplementedError, match=match):
        (jax.jit(gradient) if jit else gradient)(X)


def test_a_program_for_several_devices_says_to_call_outside(threads):
    mesh = jax.make_mesh((3,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    x = jax.device_put(X, sharding)
    match = "must be in a program for one device.*for 3.*outside of jit"
    with pytest.raises(NotImplementedError, match=match):
        jax.jit(total(functions.loss))(x)
    per_shard = jax.shard_map(
        on_worker1(functions.loss),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("i"),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(NotImplementedError, match=match):
        jax.jit(per_shard)(x)
    assert jnp.allclose(total(functions.loss)(x), functions.loss(X))


# --- arguments that are refused ---


def test_what_cannot_be_called_is_refused(threads):
    with pytest.raises(TypeError, match=r"remote_call\(fn\)` must be a function, and"):
        autograd.remote_call("worker1", 3, X)
    unhashable = functions.Layer(X, "tanh")  # Equal by its fields.
    with pytest.raises(TypeError, match=r"and hashable. Got Layer"):
        autograd.remote_call("worker1", unhashable, X)
    with pytest.raises(ValueError, match=r"lambda.*has none: define a function at the"):
        autograd.remote_call("worker1", lambda x: x, X)
    with pytest.raises(rpc.ForbiddenFunction, match="must be in a module that other"):
        autograd.remote_call("worker1", pytest.approx, X)
    with pytest.raises(rpc.RpcError, match="nobody"):
        autograd.remote_call("nobody", functions.loss, X)
    with pytest.raises(ValueError, match=r"remote_call\(timeout=...\)` must be finite"):
        autograd.remote_call("worker1", functions.loss, X, timeout=-3)


def test_without_workers_it_says_to_initialize():
    with pytest.raises(rpc.RpcError, match="RPC has not been initialized"):
        autograd.remote_call("worker1", functions.loss, X)


def test_a_jitted_caller_outlives_its_worker_and_serves_the_next():
    gradient = jax.jit(jax.grad(total(functions.loss)))
    with rpc.local_cluster(["worker0", "worker1"], allow=["tests"]):
        first = gradient(X)
    with pytest.raises(JaxError, match=r"use_worker\(name\)` must be a worker of this"):
        gradient(X)
    with rpc.local_cluster(["worker0", "worker1"], allow=["tests"]):
        assert (gradient(X) == first).all()


# --- errors of the function ---


def errors_while_tracing():
    for wrap in (lambda f: f, jax.jit, jax.grad, jax.vmap):
        match = r"cannot reshape array of shape \((3,|)\)"
        with pytest.raises(TypeError, match=match) as caught:
            wrap(total(functions.unshaped))(X)
        assert caught.value.remote_worker == "worker1"
        assert any("in unshaped" in note for note in caught.value.__notes__)


def test_an_error_while_tracing_has_its_own_type_everywhere(cluster):
    cluster.run(0, errors_while_tracing)


def errors_when_run():
    call = on_worker1(functions.moody)
    compiled = jax.jit(lambda x: call(x) * 2)
    try:
        rpc.rpc_sync("worker1", functions.set_mood, (False,))
        assert (compiled(X) == 2 * (X + 1)).all()
        rpc.rpc_sync("worker1", functions.set_mood, (True,))
        with pytest.raises(ValueError, match="bad mood on purpose") as caught:
            call(X)
        assert caught.value.remote_worker == "worker1"
        told = r"(?s)ValueError: in a bad mood on purpose.*worker 'worker1':.*in moody"
        with pytest.raises(JaxError, match=told):
            compiled(X)
    finally:
        rpc.rpc_sync("worker1", functions.set_mood, (False,))
    assert (compiled(X) == 2 * (X + 1)).all()
    assert (call(X) == X + 1).all()


def test_an_error_when_run_has_its_own_type_and_under_jit_its_text(cluster):
    cluster.run(0, errors_when_run)


def errors_of_nested_calls(jit):
    def through(x):
        return autograd.remote_call("worker1", functions.failing_at, x, "worker2")

    with pytest.raises(JaxError, match=r"(?s)ZeroDivisionError.*time on purpose"):
        (jax.jit(through) if jit else through)(X)


@pytest.mark.parametrize("jit", [False, True])
def test_an_error_comes_through_the_workers_between(cluster, jit):
    cluster.run(0, errors_of_nested_calls, jit)


def other_shapes():
    call = on_worker1(functions.growing)
    compiled = jax.jit(call)
    try:
        rpc.rpc_sync("worker1", functions.set_size, (3,))
        assert compiled(X).shape == call(X).shape == (9,)
        rpc.rpc_sync("worker1", functions.set_size, (2,))
        what = r"growing\)` must return what.*float64\[9\]. Got float64\[6\] from the"
        with pytest.raises(JaxError, match=f"{what} function.*jax.clear_caches"):
            compiled(X)
        assert call(X).shape == (6,)  # The error has made it ask again.
        rpc.rpc_sync("worker1", functions.set_size, (3,))
        with pytest.raises(ValueError, match=r"float64\[6\]. Got float64\[9\] from"):
            call(X)
        assert call(X).shape == compiled(X).shape == (9,)
    finally:
        rpc.rpc_sync("worker1", functions.set_size, (3,))


def test_other_shapes_than_traced_are_refused(cluster):
    cluster.run(0, other_shapes)


# --- time and loss ---


def learn_its_result(call):
    """Asks the callee, which traces the function, until the answer comes in time."""
    while True:
        with contextlib.suppress(rpc.RpcTimeout):
            return jax.eval_shape(call, X)


def too_late(jit):
    call = functools.partial(
        autograd.remote_call, "worker1", functions.waiting, timeout=0.2
    )
    learn_its_result(call)
    error, text = (JaxError, "RpcTimeout") if jit else (rpc.RpcTimeout, "")
    try:
        match = rf"(?s){text}.*RPC ran for more than set timeout \(200 ms\).*waiting"
        with pytest.raises(error, match=match):
            (jax.jit(call) if jit else call)(X)
    finally:
        rpc.rpc_sync("worker1", functions.open_gate)
    found = autograd.remote_call("worker1", functions.waiting, X)
    rpc.rpc_sync("worker1", functions.close_gate)
    assert (found == 2 * X).all()


@pytest.mark.parametrize("jit", [False, True])
def test_a_call_that_takes_too_long_is_given_up(cluster, jit):
    cluster.run(0, too_late, jit)


def call_waiting(to, jit):
    call = functools.partial(autograd.remote_call, to, functions.waiting)
    return (jax.jit(call) if jit else call)(X)


def test_the_loss_of_the_callee_ends_the_call(fresh_hosts):
    hosts = fresh_hosts(3)
    hosts.everywhere(become_worker)
    for rank, jit in ((1, False), (2, True)):
        call = hosts.start(0, call_waiting, f"worker{rank}", jit)
        hosts.run(rank, functions.await_arrivals, 1)
        hosts.signal(rank, signal.SIGKILL)
        error, text = (JaxError, "WorkerLost: ") if jit else (rpc.WorkerLost, "")
        lost = rf"{text}Lost worker 'worker{rank}' during remote_call\(waiting\)"
        with pytest.raises(error, match=lost):
            call.result()
    hosts.run(0, rpc.shutdown, graceful=False)


def test_recorded_values_and_references_are_refused_with_the_way_out(threads):
    own = autograd.variable(functions.params(20))
    reference = rpc.remote("worker1", autograd.variable, args=(functions.params(1),))
    match = (
        r"remote_call\(\*args\)` must be neither recorded nor.*Pass the value itself"
    )
    for given in (own, reference):
        with pytest.raises(TypeError, match=match):
            autograd.remote_call("worker1", functions.layer, given, functions.rows(21))


def test_a_function_does_not_read_variables_of_its_own(threads):
    match = (
        r"remote_call\(fn=reads_a_global\)` must be a pure function.*variables as arg"
    )
    with pytest.raises(TypeError, match=match):
        autograd.remote_call("worker1", functions.reads_a_global, 2.0)
