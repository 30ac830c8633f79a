"""Every process feeds the same data.

Each process loaded the whole batch and took its rows by a place that is the same for
all of them. Devices of different hosts trained on the same rows, and other rows were
never seen.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.groups import jax_processes
from experiments.museum.meshes import Judge, Trainer, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/AI-Hypercomputer/torchprime/issues/267"
CLAIM = "The gradient of the mean over the counted tokens of all sequences."
EXPECTED = (
    "first difference: forward, embed, examples 3-5",
    "no such value is computed",
)


def buggy() -> int:
    """Which part of the batch this process feeds."""
    return 0


def fixed() -> int:
    """Which part of the batch this process feeds."""
    return jax.process_index()


def step(part: Trainer, params: Tree, batch: Tree) -> Tree:
    """Six devices of two processes, with a sequence each."""
    over = Mesh(np.array(jax.devices()), ("data",))

    def local(params: Tree, batch: Tree) -> Tree:
        count = lax.psum(batch["mask"].sum(), "data")
        mean = lambda p: model.total(p, batch) / count  # noqa: E731
        return lax.psum(jax.value_and_grad(mean)(params), "data")

    def fed(x: Tree) -> Tree:
        each = len(x) // jax.process_count()
        own = np.asarray(x)[part() * each : (part() + 1) * each]
        return jax.make_array_from_process_local_data(rows, own, x.shape)

    rows, alike = NamedSharding(over, P("data")), NamedSharding(over, P())
    whole = jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(alike, np.asarray(x)), params
    )
    run = spmd(local, over, (P(), P("data")), (P(), P()))
    return run(whole, jax.tree.map(fed, batch))


def trainer(part: Trainer) -> Trainer:
    """A step that both processes take."""
    return partial(step, part)


# --- what the judge needs ---


def asked(rank: int, candidate: Trainer) -> verify.Trace:
    """What this process hears of the judge; both call it."""
    batch, params = model.tokens(), model.params(1)
    weights = model.counts(batch)
    return verify.trace(model.losses, params, batch, candidate, weights=weights)


def judge() -> Judge:
    """The judge, in both processes."""
    return lambda trainer: jax_processes().run(asked, trainer)[0]
