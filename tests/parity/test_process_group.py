"""Two processes of ours beside two of DDP: the same training run."""

import json
import os

import numpy as np
import pytest

from jdist.rpc.processes.spawn import spawn
from tests.data_parallel import group_runs as runs
from tests.parity.pair import outputs_of_both

pytestmark = pytest.mark.parity

WORKER = """
import json, os, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from tests.data_parallel import group_runs as runs
rank, store, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
method = f"file://{store}"
distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
first, last = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
model = nn.Sequential(first, nn.Tanh(), last).double()
values = {k: torch.tensor(v) for k, v in runs.parameters().items()}
first.weight.data, first.bias.data = values["w1"].T.clone(), values["b1"]
last.weight.data = values["w2"].T.clone()
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), **runs.MOMENTUM)
own = slice(4 * rank, 4 * rank + 4)
losses = []
for step in range(steps):
    (x, y), _ = runs.examples(8, seed=step)
    optimizer.zero_grad()
    out = replica(torch.tensor(x[own]))
    loss = ((out - torch.tensor(y[own])) ** 2).sum(dim=1).mean()
    loss.backward()
    optimizer.step()
    distributed.all_reduce(loss.detach())
    losses.append(loss.item() / 2)
if rank == 0:
    leaves = {"w1": first.weight.T, "b1": first.bias, "w2": last.weight.T}
    leaves = {k: v.detach().numpy().tolist() for k, v in leaves.items()}
    print(json.dumps([losses, leaves]), flush=True)
distributed.barrier()
os._exit(0)  # Tearing gloo down now and then aborts, with threads still running.
"""


def ddps(folder, steps):
    """Losses and parameters of DistributedDataParallel on two live processes."""
    arguments = [str(folder / "store"), str(steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = outputs_of_both(["-c", WORKER], arguments, env)
    return json.loads(outputs[0][0])


def test_fifty_steps_on_two_processes_as_ddp(tmp_path):
    """On equal shards, where DDP's mean of means is the mean; SGD with momentum.

    In float64 rounding grows by a small factor per step; a wrong weight or coefficient
    shows at 1e-3.
    """
    losses, leaves = ddps(tmp_path, 50)
    ours = spawn(runs.with_momentum, args=(50,), nprocs=2, timeout=240)
    for found, params in ours:
        np.testing.assert_allclose(found, losses, rtol=1e-9)
        for name, leaf in leaves.items():
            np.testing.assert_allclose(params[name], leaf, rtol=1e-9, err_msg=name)
