"""Jobs of a pair of torch processes: the same steps by torch.distributed.pipelining."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks import _pipeline_models as models
from benchmarks._pair import Job, Spent, idle, timed


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """1F1B with every number of micro-batches, and the whole batch on one core."""
    torch.set_num_threads(1)
    # MASTER_PORT is taken by jdist; through a file torch's workers meet without a
    # second port.
    key = os.environ["JDIST_CLUSTER_KEY"][:16]
    meeting = os.path.join(gettempdir(), f"pipeline-{key}")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    whole = partial(timed, _whole(), _nothing)
    yield {
        models.WHOLE: whole if rank == 0 else idle,
        **{
            models.piped(models.ONE_F_ONE_B, m): partial(_together, _step(rank, m))
            for m in models.MICRO_BATCHES
        },
    }


def _together(call: Callable[[], Any], calls: int) -> Spent:
    distributed.barrier()
    return timed(call, _nothing, calls)


def _nothing(result: Any) -> None:
    """No wait: torch on CPU has computed when it returns."""


def _layers(begin: int, end: int) -> nn.Sequential:
    found: list[nn.Module] = []
    for matrix, bias in models.weights()[begin:end]:
        layer = nn.Linear(*matrix.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(matrix.T))
            layer.bias.copy_(torch.from_numpy(bias))
        found += [layer, nn.ReLU()]
    return nn.Sequential(*found)


def _whole() -> Callable[[], Any]:
    module = _layers(0, models.LAYERS)
    x, y = map(torch.from_numpy, models.examples(models.SMALL))

    def call() -> Any:
        module.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        return loss

    return call


def _step(rank: int, micro_batches: int) -> Callable[[], Any]:
    half = models.LAYERS // 2
    module = _layers(rank * half, (rank + 1) * half)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)
    x, y = map(torch.from_numpy, models.examples(models.SMALL))

    def call() -> None:
        module.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)

    return call
