"""Beside torch's DistributedOptimizer: the same model on three processes of each.

`w1 @ (w2 @ t)` with a weight on each of two owners, five steps with gradients of a real
backward pass, in float64: rounding grows little, and a wrong formula shows at 1e-3.
torch's own test makes one step.
"""

import importlib
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, optim, rpc

pytestmark = pytest.mark.parity

STEPS = 5
CONFIGURATIONS = {
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 0.05, "amsgrad": True},
    "SGD": {"lr": 0.05},
    "SGD, nesterov": {
        "lr": 1e-3, "momentum": 1.0, "weight_decay": 1.0, "nesterov": True,
    },
    "Adadelta": {"rho": 0.95},
    "RMSprop": {"lr": 0.05},
    "Adamax": {"lr": 0.05},
    # torch's scripted Rprop keeps its factors in float32, so these are exact there.
    "Rprop": {"lr": 0.05, "etas": (0.5, 1.25)},
}  # fmt: skip
"""As in torch's `test_dist_optim`."""

WITHOUT_SECOND = ("SGD", "RMSprop", "Rprop", "Adadelta")
"""As in torch's `test_dist_optim_none_grads`; its Adagrad does not skip."""

CASES = [
    *((name, True) for name in CONFIGURATIONS),
    *((name, False) for name in WITHOUT_SECOND),
]


def numbers(*seed):
    return np.random.default_rng(seed).normal(size=(3, 3))


# --- three processes of ours ---


def ours(rank):
    rpc.init_rpc(f"worker{rank}", allow=["tests"])
    found = [trained(*case) for case in CASES] if rank == 0 else None
    rpc.shutdown()
    return found


def trained(name, with_second):
    rrefs = [rpc.remote(f"worker{i}", variable, args=(i,)) for i in (1, 2)]
    constructor = optim.functional_optim_map[name.partition(",")[0]]
    dist_opt = autograd.DistributedOptimizer(constructor, rrefs, **CONFIGURATIONS[name])
    for step in range(STEPS):
        with autograd.context() as context_id:
            first = rrefs[0].to_here()
            second = rrefs[1].to_here() if with_second else numbers(7)
            loss = (first @ (second @ numbers(8, step))).sum()
            autograd.backward(context_id, [loss])
            dist_opt.step(context_id)
    return [np.asarray(rref.to_here()) for rref in rrefs]


def variable(seed):
    return autograd.variable(jnp.asarray(numbers(seed)))


# --- three of torch ---


def torchs(rank, store):
    theirs = importlib.import_module("torch.distributed.rpc")
    options = theirs.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    theirs.init_rpc(
        f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options
    )
    # That its own functional optimizers are old, it says against any filter.
    warnings.showwarning = lambda *told, **more: None
    found = [torch_trained(theirs, *case) for case in CASES] if rank == 0 else None
    theirs.shutdown()
    return found


def torch_trained(theirs, name, with_second):
    torch = importlib.import_module("torch")
    their_autograd = importlib.import_module("torch.distributed.autograd")
    optimizers = importlib.import_module("torch.distributed.optim")
    rrefs = [theirs.remote(f"worker{i}", torch_variable, args=(i,)) for i in (1, 2)]
    constructor = getattr(torch.optim, name.partition(",")[0])
    dist_opt = optimizers.DistributedOptimizer(
        constructor, rrefs, **CONFIGURATIONS[name]
    )
    for step in range(STEPS):
        with their_autograd.context() as context_id:
            first = rrefs[0].to_here()
            plain = torch.from_numpy(numbers(7))
            second = rrefs[1].to_here() if with_second else plain
            loss = (first @ (second @ torch.from_numpy(numbers(8, step)))).sum()
            their_autograd.backward(context_id, [loss])
            if not with_second:
                # In torch an owner that took no part in a context is an error.
                theirs.rpc_sync("worker2", nothing)
            dist_opt.step(context_id)
    return [rref.to_here().detach().numpy() for rref in rrefs]


def torch_variable(seed):
    torch = importlib.import_module("torch")
    return torch.from_numpy(numbers(seed)).requires_grad_()


def nothing():
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What both have trained, by case."""
    store = str(tmp_path_factory.mktemp("torch") / "store")
    mine = rpc.spawn(ours, nprocs=3, timeout=280)[0]
    other = rpc.spawn(torchs, (store,), nprocs=3, timeout=280)[0]
    return dict(zip(CASES, zip(mine, other, strict=True), strict=True))


@pytest.mark.parametrize(("name", "with_second"), CASES)
def test_five_steps_as_torch(runs, name, with_second):
    """A weight that the loss does not need stays as it is, in both."""
    mine, theirs = runs[name, with_second]
    for i, (found, expected) in enumerate(zip(mine, theirs, strict=True), start=1):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        moved = not np.array_equal(found, numbers(i))
        assert moved == (with_second or i == 1)
