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
      jobs: Brings `(way, params, shard)`, and takes gradients.
      store: A file by which the processes find each other.
      rank: Of this process.
      ranks: Number of processes.
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
    except EOFError:  # The trial is over.
        distributed.destroy_process_group()


def trained(way: str, params: Params, shard: Batch, ranks: int) -> Any:
    """This process's gradient after its one batch.

    Args:
      way: "mean", each process's own; "tokens", over those of all processes; "join
        initial" and "join active", the first with `join` and its two divisors.
      params: To start from.
      shard: This process's; empty where its data are at an end, which needs a join.
      ranks: Number of processes.
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
