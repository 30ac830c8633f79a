"""What is no option, name or value of a worker is refused in words, with its value."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, optim, rpc

FLAGS = [None, 1, "False", np.zeros(2)]


def cluster(**change):
    with rpc.local_cluster(**{"names": ["a"]} | change):
        pytest.fail("refused")


def joined(**change):
    given = {"rank": 0, "world_size": 1, "coordinator": "127.0.0.1:0"}
    rpc.init_rpc("w", **given | change)


def settings(**change):
    return rpc.ProcessSettings(**change)


OUTSIDE = {
    "RpcOptions(threads": (lambda v: rpc.RpcOptions(threads=v), [None, 2.0, "8", True]),
    "RpcOptions(host": (lambda v: rpc.RpcOptions(host=v), [3, ("a", 1), b"a"]),
    "RpcOptions(insecure": (lambda v: rpc.RpcOptions(insecure=v), FLAGS),
    "RpcOptions(allow_pickle": (lambda v: rpc.RpcOptions(allow_pickle=v), FLAGS),
    "RpcOptions(tls": (
        lambda v: joined(options=rpc.RpcOptions(tls=v)),
        [True, "cert.pem"],
    ),
    "ProcessSettings(callback_threads": (
        lambda v: settings(callback_threads=v),
        [None, 2.0, "8", True],
    ),
    "ProcessSettings(batch": (lambda v: settings(batch_scheduling=v), FLAGS),
    "spawn(settings": (lambda v: rpc.spawn(max, settings=v), [{}, True, "none"]),
    "spawn(pin": (lambda v: rpc.spawn(max, pin=v), [None, 1.0, "1", True]),
    "TlsConfig(certfile": (rpc.TlsConfig, [None, 3, ["cert.pem"], np.zeros(2)]),
    "collect_all(futures": (rpc.collect_all, [None, 3, "ab", [1]]),
    "wait_all(futures": (rpc.wait_all, [None, 3, "ab", [1]]),
    "local_cluster(names": (lambda v: cluster(names=v), [None, 3, "ab", [1]]),
    "local_cluster(devices": (lambda v: cluster(devices=v), [3, "cpu", [0], ["cpu:0"]]),
    "init_rpc(allow": (lambda v: cluster(allow=v), [None, 3, b"mypkg"]),
}
"""What the message names, the call, and values of wrong types."""


def backward(context_id=None, **change):
    with autograd.context() as own:
        root = autograd.apply(jnp.square, autograd.variable(3.0))
        autograd.backward(own, [root], **change)


def graph(**change):
    with autograd.context() as own:
        autograd.graph(own, **change)


WITHIN = {
    "rpc_sync(timeout": (
        lambda v: rpc.rpc_sync("a", max, args=(1, 2), timeout=v),
        [None, "1", np.zeros(2), True],
    ),
    "RemoteModule(trainable": (
        lambda v: rpc.RemoteModule("a", dict, trainable=v),
        FLAGS,
    ),
    "backward(retain_graph": (lambda v: backward(retain_graph=v), FLAGS),
    "graph(roots": (lambda v: graph(roots=v), [None, 3, "ab", [1.0]]),
    "graph(names": (lambda v: graph(names=v), [3, "ab", ["x"]]),
    "replicated(group": (
        lambda v: autograd.replicated({"w": 1.0}, v),
        [None, 3, [1], np.zeros(2)],
    ),
    "DistributedOptimizer(params_rrefs": (
        lambda v: autograd.DistributedOptimizer(optim.sgd, v, lr=0.1),
        [None, 3, "ab", rpc.RRef, [1]],
    ),
}


def refused(call, values, named):
    for value in values:
        with pytest.raises(TypeError, match=r"`.*` must .*Got ") as caught:
            call(value)
        if "timeout" not in named:
            assert named in str(caught.value), (value, caught.value)


@pytest.mark.parametrize("named", OUTSIDE)
def test_a_wrong_type(named):
    refused(*OUTSIDE[named], named)


@pytest.fixture(scope="module")
def worker():
    with rpc.local_cluster(["a"]):
        yield


@pytest.mark.parametrize("named", WITHIN)
def test_a_wrong_type_in_a_worker(worker, named):
    with rpc.use_worker("a"):
        refused(*WITHIN[named], named)


@pytest.mark.parametrize("name", [["a"], 3, None, {}])
def test_no_worker_of_this_process(worker, name):
    expected = r"use_worker\(name\)` must be a worker of this process, one of \['a'\]"
    with pytest.raises(ValueError, match=expected), rpc.use_worker(name):
        pytest.fail("refused")


@pytest.mark.parametrize("given", [5, ["host"], ("host",), (1, "host"), object()])
def test_no_address_of_a_coordinator(given):
    with pytest.raises(ValueError, match=r"coordinator=...\)` must be .host:port. or"):
        joined(coordinator=given)


def test_leaks_are_one_of_two_words():
    with pytest.raises(
        ValueError, match=r"leaks=...\)` must be one of 'warn', 'error'"
    ):
        rpc.RpcOptions(leaks=np.zeros(2))
