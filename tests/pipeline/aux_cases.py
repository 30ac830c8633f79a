"""A loss function with auxiliary outputs, as a worker of the tests runs it."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline
from tests.pipeline import epochs, models, pipedream_rules
from tests.pipeline.epochs import paired


def losses(y, batch):
    """The losses; and a count, a row, and a sum of what only that reads."""
    error = y - batch["target"]
    aux = {
        "above": (error > 0).sum(),
        "worst": [jnp.abs(error).max(0)],
        "ids": batch["id"].astype(jnp.int32).sum(),
    }
    return (error**2).sum(-1), aux


def expected(y, batch, sizes):
    """The same by NumPy, micro-batch by micro-batch."""
    found = {"above": [], "worst": [], "ids": []}
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        rows = slice(end - size, end)
        error = np.asarray(y)[rows] - batch["target"][rows]
        found["above"].append((error > 0).sum())
        found["worst"].append(np.abs(error).max(0))
        found["ids"].append(batch["id"][rows].sum())
    return {name: np.stack(entries) for name, entries in found.items()}


def problem(examples=7, dtype=np.float32):
    """That of the models, with an entry that neither stages nor losses read."""
    params, batch, weights = models.problem(examples, dtype=dtype)
    return params, batch | {"id": np.arange(examples) ** 2}, weights


def made(schedule, places=None, **options):
    options = {"optimizer": optim.sgd(lr=0.1), "has_aux": True} | options
    return pipeline.Pipeline(models.stages(), losses, schedule, places, **options)


def everything(schedule, places=None):
    """What a step, an evaluation, `fit` and an epoch of PipeDream put out."""
    pipe = made(schedule, places)
    params, batch, weights = problem()
    (_, of_gradient), _ = pipe.value_and_grad(pipe.place(params), batch, weights)
    state, metrics = pipe.train_step(pipe.init(params), batch, weights)
    evaluated = pipe.evaluate(state, batch, weights)
    _, fitted = pipeline.fit(pipe, state, [(batch, weights)])
    found = of_gradient, metrics.aux, evaluated.aux, fitted[0].aux
    return jax.tree.map(np.asarray, found), asynchronous(
        places, replicas=[len(workers) for workers in schedule.placement]
    )


def asynchronous(places=None, **options):
    """The auxiliary outputs of an epoch of PipeDream."""
    n = 3
    params, batches, weights = pipedream_rules.problem(n, 6, dtype=np.float32)
    runtime = epochs.asynchronous(
        pipedream_rules.stages(n),
        losses,
        places,
        optimizer=optim.sgd(lr=0.1),
        has_aux=True,
        **options,
    )
    rows = [b | {"id": np.arange(len(b["x"])) + i} for i, b in enumerate(batches)]
    _, metrics = runtime.train_epoch(runtime.init(params), paired(rows, weights))
    return metrics.aux
