"""One process of torch's DDP group: steps on its own shard, as it is told."""

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from experiments.strangers import torch_model
from experiments.strangers.problem import Batch, Params

SECONDS = 60


def serve(jobs: Connection, store: str, rank: int, ranks: int) -> None:
    """Takes steps with the others and answers with gradients, until the pipe ends.

    Args:
      jobs: Receives `(way, params, shard)` and sends gradients.
      store: A file through which the processes meet.
      rank: The rank of this process.
      ranks: The number of processes.
    """
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        while True:
            way, params, shard = jobs.recv()
            jobs.send(trained(way, params, shard, ranks))
    except EOFError:  # the trial has ended
        distributed.destroy_process_group()


def trained(way: str, params: Params, shard: Batch, ranks: int) -> Any:
    """This process's gradient after its one batch.

    Args:
      way: "mean" for the mean of each process; "tokens" for that over the tokens of
        all processes; "join initial" and "join active" for the first with `join` and
        its two divisors.
      params: The initial parameters.
      shard: The shard of this process; empty at the end of its data, in a join.
      ranks: The number of processes.
    """
    module = torch_model.NextToken()
    torch_model.start(module, params)
    model = DistributedDataParallel(module)
    rows = torch_model.rows(shard)
    batches = [torch.utils.data.default_collate(rows)] if rows else []
    if way.startswith("join"):
        initial = way == "join initial"
        with model.join(divide_by_initial_world_size=initial):
            for batch in batches:
                torch_model.weighted_mean(model, batch).backward()
    elif way == "mean":
        torch_model.weighted_mean(model, batches[0]).backward()
    else:
        total = batches[0]["weights"].sum()
        distributed.all_reduce(total)
        loss = torch_model.weighted_sum(model, batches[0])
        (loss * ranks / total).backward()
    return torch_model.gradient(module)
