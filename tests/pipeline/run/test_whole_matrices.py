"""Muon and Adafactor in pipelines: each stage's matrices are stepped whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import data_parallel, optim, pipeline, verify

OPTIMIZERS = {
    "muon": optim.muon(lr=0.02),
    "adafactor": optim.adafactor(lr=0.05),
}
SPECS = [P(None, "model"), P("model")]


def layer(w, h):
    return jnp.tanh(h @ w)


STAGES = [
    pipeline.Stage(layer, ("x",), ("h",)),
    pipeline.Stage(layer, ("h",), ("y",)),
]


def loss_fn(y, batch):
    return jnp.sum((y - batch["target"]) ** 2, axis=1)


def losses(params, batch):
    return loss_fn(layer(params[1], layer(params[0], batch["x"])), batch)


def trainer(places, optimizer, specs=None):
    """A pipeline that keeps its state, as the judge calls it."""
    schedule = pipeline.gpipe(2, 2)
    pipe = pipeline.Pipeline(STAGES, loss_fn, schedule, places, optimizer=optimizer)
    kept = []

    def step(params, opt_state, batch):
        if opt_state is not None:  # the first step
            kept[:] = [pipe.init(pipe.place(params, specs) if places else params)]
        kept[0], _ = pipe.train_step(kept[0], batch)
        return list(kept[0].params), None

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_the_whole_matrices(name, rng):
    opt = OPTIMIZERS[name]
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2)
    places = [Mesh(own, ("data", "model")) for own in devices]
    divided = [
        data_parallel.zero(opt, mesh, specs=spec)
        for mesh, spec in zip(places, SPECS, strict=True)
    ]
    params = [jnp.asarray(rng.standard_normal((6, 6)), jnp.float32) for _ in STAGES]
    batches = [
        {k: np.float32(rng.standard_normal((8, 6))) for k in ("x", "target")}
        for _ in range(2)
    ]
    whole = Mesh(devices[:, :, 0], ("stage", "data"))
    report = verify.step(
        losses,
        opt.step,
        (params, opt.init(params)),
        batches,
        {
            "one device": trainer(None, opt),
            "meshes": trainer(places, opt, SPECS),
            "zero on meshes": trainer(places, divided, SPECS),
            "one program": trainer(pipeline.OneProgram(whole), opt),
        },
    )
    report.raise_if_failed()
