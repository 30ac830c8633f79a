"""Each program is compiled once, and none after the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdist import autograd, optim, rpc
from tests.autograd import engine_cases as cases

OPTIMIZERS = {
    "sgd": (optim.sgd, {"lr": 0.1, "momentum": 0.5}),
    "adam": (optim.adam, {"lr": 0.1}),
}


def anywhere(array):
    return array


def jaxs(array):
    return jnp.asarray(array)


def here(array):
    return jax.device_put(array, jax.devices()[0])


def apart(array):
    return jax.device_put(array, jax.devices()[5])


def spread(array):
    mesh = jax.make_mesh((2,), ("all",), devices=jax.devices()[:2])
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))


def layer(params, x):
    weights, shift = params
    return jnp.tanh(x @ weights + shift[None])


def at_home(variable, x):
    return autograd.apply(layer, variable, x).sum()


def away(variable, x):
    return rpc.rpc_sync(
        "worker1", cases.total, args=(autograd.apply(layer, variable, x),)
    )


def all_away(variable, x):
    return rpc.rpc_sync("worker2", layer, args=(variable, x)).sum()


PLACES = {
    "anywhere": (anywhere, anywhere),
    "jax": (jaxs, jaxs),
    "data": (anywhere, here),
    "params": (here, anywhere),
    "both": (here, here),
    "apart": (apart, anywhere),
    "both apart": (apart, apart),
    "spread": (spread, anywhere),
    "both spread": (spread, spread),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("compute", [at_home, away, all_away], ids=lambda f: f.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_compiles_after_the_first_step(
    threads, compilations, optimizer, compute, place
):
    threads.run(0, steps, compilations, optimizer, compute, *PLACES[place])


def steps(compilations, optimizer, compute, params_at, data_at):
    rng = np.random.default_rng(7)
    made = [rng.normal(size=s).astype(np.float32) for s in ((4, 3), (3,))]
    variable = autograd.variable([params_at(x) for x in made])
    x = data_at(rng.normal(size=(5, 4)).astype(np.float32))
    factory, options = OPTIMIZERS[optimizer]
    dist_opt = autograd.DistributedOptimizer(factory, [rpc.RRef(variable)], **options)
    counts = []
    for _ in range(3):
        before = len(compilations)
        with autograd.context() as context_id:
            autograd.backward(context_id, [compute(variable, x)])
            dist_opt.step(context_id, max_norm=0.7)
        counts.append(len(compilations) - before)
    assert counts[1:] == [0, 0], counts


def wide(params, x):
    return jnp.sin(x @ params[0]) * params[1][None]


def test_each_program_is_compiled_once(compilations):
    """Both halves of two functions, and the update: a root's cotangent takes none."""
    with rpc.local_cluster(["a"]):
        variable = autograd.variable([np.ones((2, 9), "f4"), np.full(9, 3, "f4")])
        factory, options = OPTIMIZERS["sgd"]
        refs = [rpc.RRef(variable)]
        dist_opt = autograd.DistributedOptimizer(factory, refs, **options)
        x, before = np.full((7, 2), 0.3, "f4"), len(compilations)
        with autograd.context() as context_id:
            loss = autograd.apply(wide, variable, x).sum()
            autograd.backward(context_id, [loss])
            dist_opt.step(context_id)
    assert len(compilations) - before == 5


@pytest.mark.parametrize("committed", [False, True])
def test_a_gradient_is_committed_if_its_variable_is(committed):
    """Whatever the data, the cotangent and the hooks are."""
    put = here if committed else jaxs
    with rpc.local_cluster(["a"]):
        x, y = (autograd.variable(put(np.float32([k, 2, 5]))) for k in (3, 7))
        y.register_hook(lambda gradient: here(np.asarray(gradient) * 2))
        with autograd.context() as context_id:
            root = x * here(np.float32([1, 4, 6])) + y
            ones = here(np.float32([1, 2, 3]))
            autograd.backward(context_id, [root], cotangents=[ones])
            found = autograd.get_gradients(context_id)
            assert [found[v].committed for v in (x, y)] == [committed, committed]
            assert [found[v].tolist() for v in (x, y)] == [[1, 8, 18], [2, 4, 6]]
