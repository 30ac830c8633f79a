"""Does the end-to-end script of PyTorch's design note on distributed autograd, in
jdist, compute what one device does?

Each of two processes creates two random 3 x 3 variables on the other, adds them
locally, runs the backward pass, and steps them on their owner by a DistributedOptimizer
(SGD, lr 0.05). Both run concurrently. Every value is compared with one device's and, if
torch is installed, with the same script in torch.

    python -m experiments dist_autograd_simple
    python -m jdist.launch --nproc 2 -m experiments.dist_autograd_simple

or by hand, with RANK 0 and 1, WORLD_SIZE 2, MASTER_ADDR, MASTER_PORT and a common
JDIST_CLUSTER_KEY in the environment: python -m experiments.dist_autograd_simple
"""

import importlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import autograd, optim, rpc

RATE = 0.05
STEPS, QUICK_STEPS = 50, 5
# Both round once per operation, in their own order: in each step one unit in the last
# place of numbers below 4. This is the bound over all steps.
TORCH_ERROR = 2.0**-20


class Trained(NamedTuple):
    """The record of one process on the two variables that it trains on the other."""

    losses: list[float]
    gradients: list[Any]
    """Gradients of both at the last step, on their owner."""
    values: list[Any]
    """Values of both after the last step."""


def run(settings: Settings, progress: Progress) -> Result:
    """Runs the script in two processes, on one device, and in torch."""
    steps = QUICK_STEPS if settings.quick else STEPS
    found = rpc.spawn(ours, (steps, settings.seed), nprocs=2, timeout=300)
    alone = [one_device(rank, steps, settings.seed) for rank in (0, 1)]
    torchs = _in_torch(steps, settings.seed) if _has_torch() else None
    claims = [*judged(found, alone), beside_torch(found, torchs)]
    return Result(
        claims=claims,
        pictures=[
            Picture(
                "losses",
                "Squared distance of the sum of two remote variables from a target, as "
                "each process sees it (lines), and on one device (dots).",
                plot(found, alone),
            )
        ],
        tables={"After the last step": rows(found, alone, torchs)},
        data={f"worker{rank}": _listed(one) for rank, one in enumerate(found)},
    )


# --- the script ---


def random_variable(seed: Sequence[int]) -> autograd.Variable:
    """Makes a random variable on the worker that is called."""
    return autograd.variable(jnp.asarray(random_numbers(seed)))


def train(rank: int, steps: int, seed: int) -> Trained:
    """The program of each process, after rpc is initialized."""
    other = f"worker{1 - rank}"
    target = random_numbers((seed, rank, 2))
    rrefs = [
        rpc.remote(other, random_variable, args=((seed, rank, i),)) for i in (0, 1)
    ]
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=RATE)
    losses = []
    for _ in range(steps):
        with autograd.context() as context_id:
            first, second = (rref.to_here() for rref in rrefs)
            distance = first + second - target
            loss = (distance * distance).sum()
            autograd.backward(context_id, [loss])
            gradients = rpc.rpc_sync(other, gradients_of, args=(rrefs, context_id))
            dist_opt.step(context_id)
        losses.append(float(loss.value))
    values = rpc.rpc_sync(other, values_of, args=(rrefs,))
    return Trained(losses, gradients, values)


def gradients_of(rrefs: Sequence[rpc.RRef[Any]], context_id: int) -> list[Any]:
    """The gradients of the backward pass; called on the owner."""
    gradients = autograd.get_gradients(context_id)
    return [np.asarray(gradients[rref.local_value()]) for rref in rrefs]


def values_of(rrefs: Sequence[rpc.RRef[Any]]) -> list[Any]:
    """The values of the variables; called on the owner."""
    return [np.asarray(rref.local_value().value) for rref in rrefs]


def ours(rank: int, steps: int, seed: int) -> Trained:
    """Entry point of each of the two processes."""
    rpc.init_rpc(f"worker{rank}", allow=("experiments",))
    try:
        return train(rank, steps, seed)
    finally:
        rpc.shutdown()


def random_numbers(seed: Sequence[int]) -> np.ndarray:
    """Random float32 numbers in [0, 1), `(3, 3)`."""
    return np.random.default_rng(tuple(seed)).random((3, 3), np.float32)


# --- the same elsewhere ---


def one_device(rank: int, steps: int, seed: int) -> Trained:
    """The same training on one device, without rpc or distributed autograd."""
    values: Any = [jnp.asarray(random_numbers((seed, rank, i))) for i in (0, 1)]
    target = random_numbers((seed, rank, 2))
    opt = optim.sgd(lr=RATE)
    state, step = opt.init(values), jax.jit(opt.step)

    @jax.value_and_grad
    def loss_of(values: Any) -> jax.Array:
        distance = values[0] + values[1] - target
        return (distance * distance).sum()

    losses = []
    for _ in range(steps):
        loss, gradients = loss_of(values)
        values, state = step(values, gradients, state)
        losses.append(float(loss))
    return Trained(losses, [*map(np.asarray, gradients)], [*map(np.asarray, values)])


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _in_torch(steps: int, seed: int) -> list[Trained]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (steps, seed, f"{folder}/store")
        return rpc.spawn(torchs_script, arguments, nprocs=2, timeout=300)


def torchs_script(rank: int, steps: int, seed: int, store: str) -> Trained:
    """The note's script in torch."""
    import torch
    from torch.distributed import rpc as theirs
    from torch.distributed.optim import DistributedOptimizer

    their_autograd = importlib.import_module("torch.distributed.autograd")

    # torch's warning that its own functional optimizers are deprecated bypasses all
    # filters.
    warnings.showwarning = lambda *told, **more: None
    torch.set_num_threads(1)
    options = theirs.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    theirs.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options
    )
    other = f"worker{1 - rank}"
    target = torch.from_numpy(random_numbers((seed, rank, 2)))
    rrefs = [
        theirs.remote(other, _torch_variable, args=((seed, rank, i),)) for i in (0, 1)
    ]
    dist_opt = DistributedOptimizer(torch.optim.SGD, rrefs, lr=RATE)
    losses = []
    for _ in range(steps):
        with their_autograd.context() as context_id:
            first, second = (rref.to_here() for rref in rrefs)
            distance = first + second - target
            loss = (distance * distance).sum()
            their_autograd.backward(context_id, [loss])
            gradients = theirs.rpc_sync(
                other, _torch_gradients, args=(rrefs, context_id)
            )
            dist_opt.step(context_id)
        losses.append(loss.item())
    values = [rref.to_here().detach().numpy() for rref in rrefs]
    theirs.shutdown()
    return Trained(losses, [g.numpy() for g in gradients], values)


def _torch_variable(seed: Sequence[int]) -> Any:
    import torch

    return torch.from_numpy(random_numbers(seed)).requires_grad_()


def _torch_gradients(rrefs: Any, context_id: int) -> list[Any]:
    their_autograd = importlib.import_module("torch.distributed.autograd")
    gradients = their_autograd.get_gradients(context_id)
    return [gradients[rref.local_value()] for rref in rrefs]


# --- what came out ---


def judged(found: Sequence[Trained], alone: Sequence[Trained]) -> Iterator[Claim]:
    """Compares both processes with one device."""
    for what in ("gradients", "values"):
        pairs = [
            (mine, expected)
            for one, other in zip(found, alone, strict=True)
            for mine, expected in zip(
                getattr(one, what), getattr(other, what), strict=True
            )
        ]
        equal = sum(a.tobytes() == b.tobytes() for a, b in pairs)
        text = f"{what} of all remote variables are one device's, bit for bit"
        shown = f"{equal} of {len(pairs)}"
        yield Claim(text, equal == len(pairs) == 4, shown, leads=True)
    falls = all(one.losses[-1] < 0.7 * one.losses[0] for one in found)
    told = ", ".join(f"{o.losses[0]:.3f} to {o.losses[-1]:.2g}" for o in found)
    yield Claim("the loss falls in both processes", falls, told)


def beside_torch(found: Sequence[Trained], torchs: Sequence[Trained] | None) -> Claim:
    """Compares with torch: the largest difference of any gradient or variable."""
    text = "torch's script leads to the same gradients and variables, to rounding"
    if torchs is None:
        return Claim(text, None, "", "torch is not installed (`make parity` does)")
    largest = max(
        float(np.max(np.abs(mine - expected)))
        for one, other in zip(found, torchs, strict=True)
        for mine, expected in zip(
            [*one.gradients, *one.values],
            [*other.gradients, *other.values],
            strict=True,
        )
    )
    return Claim(text, largest <= TORCH_ERROR, f"at most {largest:.1e} apart")


def rows(
    found: Sequence[Trained], alone: Sequence[Trained], torchs: Any
) -> list[list[str]]:
    """A table with one number of each process."""
    table = [["", "loss", "first variable [0, 0]", "its gradient"]]
    contenders = {"jdist": found, "one device": alone, "torch": torchs or []}
    for name, processes in contenders.items():
        for rank, one in enumerate(processes):
            value, gradient = one.values[0][0, 0], one.gradients[0][0, 0]
            title = f"{name}, worker{rank}"
            table.append(
                [title, f"{one.losses[-1]:.6g}", f"{value:.9f}", f"{gradient:.9f}"]
            )
    return table


def plot(found: Sequence[Trained], alone: Sequence[Trained]) -> Figure:
    """Losses on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for rank, (one, other) in enumerate(zip(found, alone, strict=True)):
        axes.semilogy(one.losses, label=f"worker{rank}", color=f"C{rank}")
        dots = f"worker{rank}'s, on one device"
        axes.semilogy(other.losses, ".", color=f"C{rank}", label=dots)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _listed(one: Trained) -> dict[str, Any]:
    return {
        "losses": one.losses,
        "gradients": [x.tolist() for x in one.gradients],
        "values": [x.tolist() for x in one.values],
    }


def main() -> None:
    """Runs this process's part; its rank and addresses come from the environment."""
    rank = int(os.environ["RANK"])
    found = ours(rank, QUICK_STEPS, 0)
    expected = one_device(rank, QUICK_STEPS, 0)
    for mine, other in zip(found.values, expected.values, strict=True):
        np.testing.assert_array_equal(mine, other)
    told = " ".join(f"{loss:.4f}" for loss in found.losses)
    Console().print(f"worker{rank}: losses {told}; variables are one device's.")


if __name__ == "__main__":
    main()
