"""Jobs of a pair of torch processes: DDP's step, and its two parts alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._ddp_models import MODELS, RATE, Model
from benchmarks._pair import Job, Spent, timed
from jdist import data_parallel


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """For each model DDP's step, and its computation and communication alone."""
    torch.set_num_threads(1)
    # MASTER_PORT is taken by jdist; through a file torch's workers meet without a
    # second port.
    meeting = os.path.join(gettempdir(), f"ddp-{os.environ['JDIST_CLUSTER_KEY'][:16]}")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    yield {
        f"{model.name}: {name}": partial(_timed, call)
        for model in MODELS
        for name, call in _parts(model, rank).items()
    }


def _timed(call: Callable[[], Any], calls: int) -> Spent:
    distributed.barrier()
    return timed(call, lambda result: None, calls)


def _parts(model: Model, rank: int) -> dict[str, Callable[[], Any]]:
    views = partial(DistributedDataParallel, gradient_as_bucket_view=True)
    return {
        "step": _step(model, rank, DistributedDataParallel),
        "tuned step": _step(model, rank, views, fused=True),
        "computation": _step(model, rank, lambda module: module),
        "communication": _communication(model),
    }


def module(model: Model) -> nn.Module:
    """The model's layers as a torch module, with the same weights."""
    layers: list[nn.Module] = []
    for matrix, bias in model.weights():
        layer = nn.Linear(*matrix.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(matrix.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _step(
    model: Model, rank: int, wrap: Callable[[nn.Module], nn.Module], **options: Any
) -> Callable[[], Any]:
    replica = wrap(module(model))
    optimizer = torch.optim.SGD(replica.parameters(), lr=RATE, **options)
    x, y = map(torch.from_numpy, model.examples(rank))
    loss_fn = nn.MSELoss()

    def call() -> Any:
        optimizer.zero_grad()
        loss = loss_fn(replica(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return call


def _communication(model: Model) -> Callable[[], Any]:
    """The all-reduce of DDP's filled buckets, started one after another."""
    # As in DDP: parameters in reverse order, a first bucket of 1 MiB, the others of 25.
    parameters = list(module(model).parameters())[::-1]
    limits = [2**20, 25 * 2**20]
    buckets = data_parallel.assign_buckets(
        [p.numpy(force=True) for p in parameters], limits
    )
    buffers = [torch.zeros(sum(parameters[i].numel() for i in b)) for b in buckets]

    def call() -> None:
        pending = [distributed.all_reduce(b, async_op=True) for b in buffers]
        for work in pending:
            work.wait()

    return call
