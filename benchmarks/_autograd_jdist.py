"""jdist's side of the autograd benchmark: passes, and optimizer steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _autograd_models as models
from benchmarks._pair import Job, idle, timed
from jdist import autograd, optim, rpc


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """Jobs of two workers: both run the end-to-end script, worker0 all others."""
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    t1, t2, t4 = (autograd.variable(models.small(i)) for i in (1, 2, 4))
    x = jnp.asarray(models.small(1))
    calls = {
        models.ECHO: partial(rpc.rpc_sync, "worker1", echo, args=(x,)),
        models.FAST: partial(_example, t1, t2, t4, "fast"),
        models.SMART: partial(_example, t1, t2, t4, "smart"),
        models.COMPILED: partial(_compiled, t1, t2, t4),
    }
    jobs: dict[str, Job] = {
        name: partial(timed, call, jax.block_until_ready) if rank == 0 else idle
        for name, call in calls.items()
    }
    script = partial(_end_to_end, f"worker{1 - rank}", rank)
    yield {**jobs, models.END_TO_END: partial(timed, script, jax.block_until_ready)}
    rpc.shutdown()


@contextmanager
def prepare_chain(rank: int) -> Iterator[dict[str, Job]]:
    """The job of three workers with a layer each; worker0 drives them."""
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    if rank:
        yield {models.CHAIN: idle}
    else:
        layers = [rpc.remote(f"worker{i}", Layer, args=(i,)) for i in range(3)]
        x = jnp.asarray(models.numbers(9, models.ROWS, models.WIDTH))
        yield {models.CHAIN: partial(timed, partial(_chain, layers, x), _nothing)}
        # Released before `shutdown`, which reports references that are left.
        del layers
    rpc.shutdown()


def echo(value: Any) -> Any:
    """Returns its argument."""
    return value


def _example(t1: Any, t2: Any, t4: Any, mode: str) -> Any:
    with autograd.context() as context_id:
        t3 = rpc.rpc_sync("worker1", jnp.add, args=(t1, t2))
        autograd.backward(context_id, [(t3 * t4).sum()], mode=mode)
        return [autograd.get_gradients(context_id)[t] for t in (t1, t2, t4)]


def _compiled(t1: Any, t2: Any, t4: Any) -> Any:
    with autograd.context() as context_id:
        t3 = rpc.rpc_sync("worker1", jnp.add, args=(t1, t2))
        loss = autograd.apply(_product_sum, t3, t4)
        autograd.backward(context_id, [loss])
        return [autograd.get_gradients(context_id)[t] for t in (t1, t2, t4)]


def _product_sum(t3: Any, t4: Any) -> Any:
    return (t3 * t4).sum()


def random_variable(seed: int) -> autograd.Variable:
    """Makes a variable on the worker that is called."""
    return autograd.variable(models.small(seed))


def _end_to_end(other: str, rank: int) -> Any:
    with autograd.context() as context_id:
        rrefs = [
            rpc.remote(other, random_variable, args=(2 * rank + i,)) for i in (0, 1)
        ]
        loss = (rrefs[0].to_here() + rrefs[1].to_here()).sum()
        autograd.backward(context_id, [loss])
        dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=models.RATE)
        dist_opt.step(context_id)
        return loss.value


class Layer:
    """A linear layer on its worker."""

    def __init__(self, seed: int) -> None:
        """Makes its weight a variable on the worker."""
        self._weight = autograd.variable(
            models.numbers(seed, models.WIDTH, models.WIDTH)
        )

    def forward(self, x: Any) -> Any:
        """The recorded product of `x` and the weight."""
        return x @ self._weight


def _chain(layers: Sequence[rpc.RRef[Any]], x: Any) -> None:
    with autograd.context() as context_id:
        for layer in layers:
            x = layer.rpc_sync().forward(x)
        autograd.backward(context_id, [x.sum()])


def _nothing(result: Any) -> None:
    """No wait: `backward` returns when the gradients are computed."""
