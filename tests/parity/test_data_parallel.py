"""torch's gradients, and torch's DDP itself, beside ours."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, verify
from jdist.data_parallel import shard_batch, value_and_grad
from tests.parity.pair import outputs_of_both
from tests.replicas import over

pytestmark = pytest.mark.parity


def losses_of(params, batch):
    """A two-layer regression, one loss per example."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return (((hidden @ params["w2"]) - y) ** 2).sum(axis=1)


@pytest.fixture
def problem(rng):
    """float64, all sizes different."""
    params = {
        "w1": rng.normal(size=(5, 7)),
        "b1": rng.normal(size=7),
        "w2": rng.normal(size=(7, 3)),
    }
    return params, (rng.normal(size=(8, 5)), rng.normal(size=(8, 3)))


def torchs(params, batch, reduce):
    """Loss and gradients of torch for `reduce(losses)`."""
    import torch

    leaves = {k: torch.tensor(v, requires_grad=True) for k, v in params.items()}
    x, y = map(torch.tensor, batch)
    hidden = torch.tanh(x @ leaves["w1"] + leaves["b1"])
    loss = reduce(((hidden @ leaves["w2"] - y) ** 2).sum(dim=1))
    loss.backward()
    return loss.item(), {k: v.grad.numpy() for k, v in leaves.items()}


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("sizes", [(5, 3), (7, 0, 1), (2, 2, 2, 2)])
def test_the_whole_batchs_gradient_is_torchs(problem, mesh, reduction, sizes):
    """Over devices and uneven shards, beside torch's autograd on the whole batch."""
    import torch

    params, batch = problem
    reduce = {"max": torch.amax, "min": torch.amin}.get(
        reduction, getattr(torch, reduction)
    )
    devices = mesh(len(sizes))
    fn = value_and_grad(losses_of, **over(devices), reduction=reduction)
    verify.gradients(
        losses_of,
        params,
        batch,
        {
            "jdist": lambda p, b: fn(p, *shard_batch(b, **over(devices), sizes=sizes)),
            "torch": lambda p, b: torchs(p, b, reduce),
        },
        reduction=reduction,
    ).raise_if_failed()


def test_ties_share_as_in_torchs_amax():
    """torch.amax shares a tie equally; so do replicas over the whole batch."""
    import torch

    x = np.array([[2.0, 4.0], [3.0, 2.0], [1.0, 1.0], [5.0, 1.0]])
    w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    torch.amax(torch.tensor(x) @ w).backward()
    fn = value_and_grad(lambda w, x: x @ w, replicas=3, reduction="max")
    _, gradient = fn(jnp.ones(2), *shard_batch(x, replicas=3, sizes=(1, 0, 3)))
    np.testing.assert_array_equal(gradient, w.grad.numpy())


WORKER = """
import json, os, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
rank, sizes, data = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
store = f"file://{sys.argv[4]}"
distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
x, y, w = (torch.tensor(v, dtype=torch.float64) for v in data)
model = nn.Linear(*w.shape[::-1], bias=False, dtype=torch.float64)
model.weight.data = w
start = sum(sizes[:rank])
own = slice(start, start + sizes[rank])
replica = DistributedDataParallel(model)
loss = ((replica(x[own]).tanh() - y[own]) ** 2).sum(1).mean()
loss.backward()
if rank == 0:
    print(json.dumps(model.weight.grad.tolist()), flush=True)
distributed.barrier()
os._exit(0)  # Tearing gloo down now and then aborts, with threads still running.
"""


def ddps(folder: Path, sizes, x, y, w):
    """The gradient that DistributedDataParallel leaves on two live processes."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    data = json.dumps([x.tolist(), y.tolist(), w.tolist()])
    arguments = [json.dumps(sizes), data, str(folder / f"store{sizes[0]}")]
    outputs = outputs_of_both([str(script)], arguments)
    return np.array(json.loads(outputs[0][0]))


def test_torchs_ddp_agrees_on_equal_shards_only(rng, tmp_path):
    """On (4, 4) DDP's gradient is the whole batch's; on (7, 1) it is the mean of means.

    Ours is the whole batch's both times: the reason for the weights.
    """
    w = rng.normal(size=(3, 5))
    x, y = rng.normal(size=(8, 5)), rng.normal(size=(8, 3))

    def losses(w, batch):
        return ((jnp.tanh(batch[0] @ w.T) - batch[1]) ** 2).sum(axis=1)

    def ours(sizes):
        fn = value_and_grad(losses, replicas=2)
        return lambda w, b: fn(w, *shard_batch(b, replicas=2, sizes=sizes))

    loss = np.asarray(losses(jnp.asarray(w), (x, y)).mean())
    equal, uneven = ((loss, ddps(tmp_path, s, x, y, w)) for s in ((4, 4), (7, 1)))
    report = verify.gradients(
        losses,
        jnp.asarray(w),
        (x, y),
        {
            "ours, 4 + 4": ours((4, 4)),
            "ours, 7 + 1": ours((7, 1)),
            "DDP, 4 + 4": lambda w, b: equal,
            "DDP, 7 + 1": lambda w, b: uneven,
        },
    )
    assert {leaf.candidate for leaf in report.failures} == {"DDP, 7 + 1"}


@pytest.mark.parametrize("nesterov", [False, True])
def test_fifty_steps_of_training_as_in_torch(problem, nesterov):
    """Uneven replicas and our SGD beside torch.optim.SGD on the whole batch.

    In float64 rounding grows by a small factor per step; 1e-9 is 4 million units of it,
    and a wrong weight or coefficient shows at 1e-3.
    """
    import torch

    params, batch = problem
    options = {"lr": 0.01, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 1e-3}
    opt = optim.sgd(**options)
    state = opt.init(params)
    fn = value_and_grad(losses_of, replicas=3)
    shards = shard_batch(batch, replicas=3, sizes=(1, 5, 2))
    leaves = {k: torch.tensor(v, requires_grad=True) for k, v in params.items()}
    torch_opt = torch.optim.SGD(leaves.values(), **options)
    x, y = map(torch.tensor, batch)
    for _ in range(50):
        params, state = opt.step(params, fn(params, *shards)[1], state)
        torch_opt.zero_grad()
        hidden = torch.tanh(x @ leaves["w1"] + leaves["b1"])
        ((hidden @ leaves["w2"] - y) ** 2).sum(dim=1).mean().backward()
        torch_opt.step()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(params[name], leaf.detach().numpy(), rtol=1e-9)
