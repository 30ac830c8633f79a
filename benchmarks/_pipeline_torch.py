"""Jobs of a pair of torch processes: the same steps by torch.distributed.pipelining."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks import _pipeline_models as models
from benchmarks._pair import Job, Spent, idle, timed


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """1F1B with every number of micro-batches, and the whole batch on one core."""
    _meet(rank)
    whole = partial(timed, _whole(), _nothing)
    yield {
        models.WHOLE: whole if rank == 0 else idle,
        **{
            models.piped(models.ONE_F_ONE_B, m): partial(_together, _step(rank, m))
            for m in models.MICRO_BATCHES
        },
    }


@contextmanager
def prepare_unequal(rank: int) -> Iterator[dict[str, Job]]:
    """Layers 1 : 2 on two processes: in two stages, and in four by zero bubbles."""
    _meet(rank)
    m, (one, two) = models.UNEQUAL_STEP, models.UNEQUAL
    small, large = one // 2, two // 2
    looped, v = (small, large, small, large), (small, large, large, small)
    cases: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
        models.ONE_F_ONE_B: (Schedule1F1B, (one, two), (rank,)),
        models.LOOPED_ZERO: (ScheduleInterleavedZeroBubble, looped, (rank, rank + 2)),
        models.ZBV: (ScheduleZBVZeroBubble, v, (rank, 3 - rank)),
    }
    yield {
        name: partial(_together, _staged(schedule, m, cut, own))
        for name, (schedule, cut, own) in cases.items()
    }


def _meet(rank: int) -> None:
    torch.set_num_threads(1)
    # MASTER_PORT is taken by jdist; through a file torch's workers meet without a
    # second port.
    key = os.environ["JDIST_CLUSTER_KEY"][:16]
    meeting = os.path.join(gettempdir(), f"pipeline-{key}")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )


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
    return _staged(Schedule1F1B, micro_batches, (half, half), (rank,))


def _staged(
    schedule_type: Any, micro_batches: int, cut: Sequence[int], own: Sequence[int]
) -> Callable[[], Any]:
    """A step of these own stages of a cut, given as numbers of layers."""
    ends = [*itertools.accumulate(cut)]
    modules = [_layers(ends[j] - cut[j], ends[j]) for j in own]
    stages = [
        PipelineStage(module, j, len(cut), torch.device("cpu"))
        for j, module in zip(own, modules, strict=True)
    ]
    given = stages[0] if len(stages) == 1 else stages
    schedule = schedule_type(given, micro_batches, loss_fn=nn.functional.mse_loss)
    x, y = map(torch.from_numpy, models.examples(models.SMALL))
    first = (x,) if 0 in own else ()
    last = {"target": y} if len(cut) - 1 in own else {}

    def call() -> None:
        for module in modules:
            module.zero_grad()
        schedule.step(*first, **last)

    return call
