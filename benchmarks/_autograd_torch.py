"""torch's side of the autograd benchmark: the same jobs by torch.distributed."""

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from benchmarks import _autograd_models as models
from benchmarks._pair import Job, idle, timed

autograd = importlib.import_module("torch.distributed.autograd")


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """The jobs of two workers, as in jdist; FAST is torch's only mode."""
    _join(rank, 2)
    t1, t2, t4 = (_variable(models.small(i)) for i in (1, 2, 4))
    example = partial(_example, t1, t2, t4)
    echoed = partial(rpc.rpc_sync, "worker1", echo, args=(t1.detach(),))
    script = partial(_end_to_end, f"worker{1 - rank}", rank)
    calls = {models.ECHO: echoed, models.FAST: example}
    jobs: dict[str, Job] = {
        name: partial(timed, call, _nothing) if rank == 0 else idle
        for name, call in calls.items()
    }
    yield {
        **jobs,
        models.END_TO_END: partial(timed, script, _nothing),
    }
    rpc.shutdown()


@contextmanager
def prepare_chain(rank: int) -> Iterator[dict[str, Job]]:
    """The job of three workers, as in jdist."""
    _join(rank, 3)
    if rank:
        yield {models.CHAIN: idle}
    else:
        layers = [rpc.remote(f"worker{i}", Layer, args=(i,)) for i in range(3)]
        x = torch.from_numpy(models.numbers(9, models.ROWS, models.WIDTH))
        yield {models.CHAIN: partial(timed, partial(_chain, layers, x), _nothing)}
        del layers
    rpc.shutdown()


def _join(rank: int, workers: int) -> None:
    # torch's warning that its own functional optimizers are deprecated bypasses all
    # filters.
    warnings.showwarning = lambda *told, **more: None
    torch.set_num_threads(1)
    # MASTER_PORT is taken by jdist; through a file torch's workers meet without a
    # second port.
    key = os.environ["JDIST_CLUSTER_KEY"][:16]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{os.path.join(gettempdir(), f'autograd-{key}')}"
    )
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options
    )


def _variable(array: Any) -> Any:
    return torch.from_numpy(array).requires_grad_()


def echo(value: Any) -> Any:
    """Returns its argument."""
    return value


def _example(t1: Any, t2: Any, t4: Any) -> Any:
    with autograd.context() as context_id:
        t3 = rpc.rpc_sync("worker1", torch.add, args=(t1, t2))
        autograd.backward(context_id, [(t3 * t4).sum()])
        gradients = autograd.get_gradients(context_id)
        return [gradients[t] for t in (t1, t2, t4)]


def random_variable(seed: int) -> Any:
    """Makes a variable on the worker that is called."""
    return _variable(models.small(seed))


def _end_to_end(other: str, rank: int) -> Any:
    with autograd.context() as context_id:
        rrefs = [
            rpc.remote(other, random_variable, args=(2 * rank + i,)) for i in (0, 1)
        ]
        loss = (rrefs[0].to_here() + rrefs[1].to_here()).sum()
        autograd.backward(context_id, [loss])
        dist_opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=models.RATE)
        dist_opt.step(context_id)
        return loss


class Layer:
    """A linear layer on its worker."""

    def __init__(self, seed: int) -> None:
        """Makes its weight a variable on the worker."""
        self._weight = _variable(models.numbers(seed, models.WIDTH, models.WIDTH))

    def forward(self, x: Any) -> Any:
        """The recorded product of `x` and the weight."""
        return x @ self._weight


def _chain(layers: Sequence[Any], x: Any) -> None:
    with autograd.context() as context_id:
        for layer in layers:
            x = layer.rpc_sync().forward(x)
        autograd.backward(context_id, [x.sum()])


def _nothing(result: Any) -> None:
    """No wait: torch on CPU has computed when it returns."""
