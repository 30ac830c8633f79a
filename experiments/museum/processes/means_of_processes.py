"""The means of hosts are averaged, whatever their tokens.

Each device divided by its own counted tokens, and loss and gradient were averaged over
all devices of all hosts. Targets differ in length, so tokens of short ones counted for
more.
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

THREAD = "https://github.com/huggingface/transformers/pull/19494"
CLAIM = "The gradient of the mean over the counted tokens of all hosts."
EXPECTED = ("first difference: backward, token loss", "2.1667 times")


def buggy(own: Tree) -> Tree:
    """The divisor of a device's sum of losses."""
    return own * lax.axis_size("data")


def fixed(own: Tree) -> Tree:
    """The divisor of a device's sum of losses."""
    return lax.psum(own, "data")


def step(part: Trainer, params: Tree, batch: Tree) -> Tree:
    """Six devices of two processes, with a sequence each."""
    over = Mesh(np.array(jax.devices()), ("data",))

    def local(params: Tree, batch: Tree) -> Tree:
        divisor = part(batch["mask"].sum())
        mean = lambda p: model.total(p, batch) / divisor  # noqa: E731
        return lax.psum(jax.value_and_grad(mean)(params), "data")

    rows, alike = NamedSharding(over, P("data")), NamedSharding(over, P())

    def fed(x: Tree) -> Tree:
        each = len(x) // jax.process_count()
        own = np.asarray(x)[jax.process_index() * each :][:each]
        return jax.make_array_from_process_local_data(rows, own, x.shape)

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
