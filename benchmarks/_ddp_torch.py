"""Jobs of a pair of torch processes: DDP's step, and its two parts alone."""

import os
import time
from collections.abc import Callable
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._ddp_models import MODELS, RATE, Model
from benchmarks._pair import Job


def prepare(rank: int) -> dict[str, Job]:
    """For each model: DDP's step, computation alone, communication alone."""
    torch.set_num_threads(1)
    # MASTER_PORT is the run's own; a file lets torch meet without a second one.
    meeting = os.path.join(gettempdir(), f"ddp-{os.environ['JDIST_CLUSTER_KEY'][:16]}")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    jobs: dict[str, Job] = {}
    for model in MODELS:
        for name, call in _parts(model, rank).items():
            jobs[f"{model.name}: {name}"] = partial(_timed, call)
    return jobs


def _timed(call: Callable[[], Any], calls: int) -> float:
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _parts(model: Model, rank: int) -> dict[str, Callable[[], Any]]:
    return {
        "step": _step(model, rank, DistributedDataParallel),
        "computation": _step(model, rank, lambda module: module),
        "communication": _communication(model),
    }


def module(model: Model) -> nn.Module:
    """The same layers with the same weights."""
    layers: list[nn.Module] = []
    for matrix, bias in model.weights():
        layer = nn.Linear(*matrix.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(matrix.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _step(
    model: Model, rank: int, wrap: Callable[[nn.Module], nn.Module]
) -> Callable[[], Any]:
    replica = wrap(module(model))
    optimizer = torch.optim.SGD(replica.parameters(), lr=RATE)
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
    """DDP's buckets, filled already, summed one after another."""
    parameters = list(module(model).parameters())[::-1]
    buckets, _ = distributed._compute_bucket_assignment_by_size(
        parameters, [2**20, 25 * 2**20]
    )
    buffers = [
        torch.zeros(sum(parameters[i].numel() for i in bucket)) for bucket in buckets
    ]

    def call() -> None:
        pending = [distributed.all_reduce(b, async_op=True) for b in buffers]
        for work in pending:
            work.wait()

    return call
