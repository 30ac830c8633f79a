"""Stages that update together, as a worker of PipeDream's tests runs them."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline
from tests.pipeline.epochs import asynchronous
from tests.pipeline.pipedream_rules import OPTIMIZERS, adam, layer, losses
from tests.pipeline.pipedream_rules import problem as chain

ADAM = OPTIMIZERS[adam]
SCALED = optim.with_master_weights(
    optim.sgd(lr=0.1), compute_dtype=jnp.float16, loss_scale=64.0
)
SIDES = [(3, 5), (5, 4), (4, 5)]


def stages(tied):
    values = ("x", "h1", "h2", "y")
    shared = [{"b": "bias"}, {}, {"b": "bias"}]
    return [
        pipeline.Stage(layer, values[j : j + 1], values[j + 1 : j + 2], tied=own)
        for j, own in enumerate(shared if tied else [{}] * 3)
    ]


def problem(m, tied=False, dtype=np.float64):
    """Three stages, m batches of unequal sizes and weights."""
    _, batches, weights = chain(3, m, dtype=dtype)
    rng = np.random.default_rng(m)
    shapes = SIDES if tied else [*SIDES[:2], (4, 2)]
    params = [
        {
            "w": jnp.asarray(rng.normal(size=s), dtype),
            "b": jnp.asarray(rng.normal(size=s[1]), dtype),
        }
        for s in shapes
    ]
    if tied:
        params[2]["b"] = jnp.copy(params[0]["b"])
        batches = [
            b | {"target": rng.normal(size=(len(b["x"]), 5)).astype(dtype)}
            for b in batches
        ]
    return params, batches, weights


def made(policy, k=1, *, tied=False, optimizer=ADAM, places=None, **options):
    return asynchronous(
        stages(tied),
        losses,
        places,
        optimizer=optimizer,
        policy=policy,
        update_every=max(k, 3) if policy == "2bw" else k,
        **options,
    )


def epochs(places=None):
    """The parameters after epochs of several kinds, of batches from generators."""
    found = []
    for tied, options in [
        (False, {"policy": "vertical_sync", "max_norm": 0.3}),
        (True, {"policy": "flush", "k": 2, "reduction": "sum"}),
    ]:
        runtime = made(tied=tied, places=places, **options)
        params, batches, weights = problem(8, tied, np.float32)
        given = zip(batches, weights, strict=True)
        state, _ = runtime.train_epoch(runtime.init(params), given)
        found.append(jax.tree.map(np.asarray, state.params))
    return found
