"""The job of a pair of torch processes: a value is made by `remote` and fetched."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import gettempdir
from typing import Any

import numpy as np

from benchmarks._pair import Job, Spent, timed


def negative(x: Any) -> Any:
    """The computation of a value on its owner."""
    return -x


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """The job of `remote` and `to_here` of a 3x3 array, run by rank 0."""
    import torch
    from torch.distributed import rpc

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # MASTER_PORT is taken by jdist; through a file torch's workers meet without a
    # second port.
    meeting = os.path.join(gettempdir(), f"rref-{os.environ['JDIST_CLUSTER_KEY'][:16]}")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    x = torch.from_numpy(np.random.default_rng(0).random((3, 3)))

    def call() -> Any:
        return rpc.remote("worker1", negative, args=(x,)).to_here()

    def job(calls: int) -> Spent:
        return timed(call, lambda last: None, calls) if rank == 0 else Spent(0.0, 0.0)

    yield {"remote, to_here": job}
    rpc.shutdown()
