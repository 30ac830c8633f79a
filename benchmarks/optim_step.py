"""One optimizer step of 25 M float32 parameters, beside optax and torch.

In 16 tensors and in 1000; SGD with momentum, Adam and AdamW, donated and in place. All
contenders have the same number of threads. torch is left out if it is not installed,
and timed separately: its OpenMP threads spin for a while after each step, which makes
the next contender on the same cores 20 to 30 % slower.

The limit is the traffic of a perfectly fused kernel (each array read once and written
once where it changes) at the measured bandwidth of a copy.

XLA on CPU writes one array per loop, so that Adam makes 10 passes over the arrays where
one fused kernel makes 7; on a GPU XLA fuses all of it.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, Timing, race
from jdist import optim

PARAMETERS = 25_000_000
TENSORS = (16, 1000)
BYTES = 4 * PARAMETERS
LR = 1e-3
OF_OPTAX = 1.05
OF_TORCH = {"SGD momentum": ("torch foreach", 0.6), "AdamW": ("torch fused", 1.3)}
# Passes over arrays of the parameters' size: reads and writes of a fused kernel.
CONTENDERS: dict[str, tuple[optim.Optimizer, Any, tuple[str, dict[str, Any]], int]] = {
    "SGD momentum": (
        optim.sgd(lr=LR, momentum=0.9),
        optax.sgd(LR, momentum=0.9),
        ("SGD", {"lr": LR, "momentum": 0.9}),
        5,  # p, g, b in; p, b out
    ),
    "Adam": (
        optim.adam(lr=LR),
        optax.adam(LR),
        ("Adam", {"lr": LR}),
        7,  # p, g, m, v in; p, m, v out
    ),
    "AdamW": (
        optim.adamw(lr=LR),
        optax.adamw(LR, weight_decay=1e-2),
        ("AdamW", {"lr": LR}),
        7,
    ),
}


def measure() -> list[Case]:
    """All algorithms, both numbers of tensors, then steps within a training step."""
    bandwidth = copy_bandwidth()
    cases = [
        one(name, tensors, bandwidth) for tensors in TENSORS for name in CONTENDERS
    ]
    return [*cases, inside_training()]


def one(name: str, tensors: int, bandwidth: float) -> Case:
    """One algorithm with the parameters in `tensors` arrays."""
    ours, theirs, torch_args, passes = CONTENDERS[name]
    step = Donated(ours.init, ours.step, tensors)
    contenders: dict[str, Callable[[], Any]] = {
        "jdist": step,
        "optax": Donated(theirs.init, optax_step(theirs), tensors),
    }
    timings = race(contenders, rounds=20)
    if find_spec("torch"):
        kinds = {
            f"torch {kind}": torch_step(*torch_args, kind, tensors)
            for kind in ("foreach", "fused")
        }
        # Separately: torch's spinning threads would slow down the next contender.
        timings |= race(kinds, rounds=20)
    limit = passes * BYTES / bandwidth
    share = limit / timings["jdist"].median
    extra = step.extra_bytes / BYTES
    note = (
        f"{_cores()} threads each; limit: {passes} passes at {bandwidth / 1e9:.1f} GB/s"
        f" of copying, jdist reaches {share:.0%}; extra memory {extra:.2%}; "
        f"{_ratios(timings)}"
    )
    against = [("optax", OF_OPTAX), *([OF_TORCH[name]] if name in OF_TORCH else [])]
    goals = [
        Goal(f"of {other}", ratio(timings["jdist"], timings[other]), most)
        for other, most in against
        if other in timings
    ]
    return Case(f"{name}, {tensors} tensors of 25 M", timings, limit, note, goals)


class Donated:
    """A compiled step that updates its own parameters and state in place."""

    def __init__(
        self, init: Callable[[Any], Any], step: Callable[..., Any], tensors: int
    ) -> None:
        """Makes the arrays and compiles the step."""
        self.params = arrays(tensors, 1.0)
        self.grads = arrays(tensors, 1e-3)
        self.state = init(self.params)
        self.step = (
            jax.jit(step, donate_argnums=(0, 2))
            .lower(self.params, self.grads, self.state)
            .compile()
        )
        memory = self.step.memory_analysis()
        self.extra_bytes = memory.temp_size_in_bytes if memory else float("nan")

    def __call__(self) -> Any:
        """Takes one step."""
        self.params, self.state = self.step(self.params, self.grads, self.state)
        return self.params, self.state


def arrays(tensors: int, scale: float) -> dict[str, jax.Array]:
    """Random arrays with `PARAMETERS` numbers in total."""
    keys = jax.random.split(jax.random.key(0), tensors)
    shape = (PARAMETERS // tensors,)
    drawn = (scale * jax.random.normal(key, shape) for key in keys)
    return {f"p{i:04d}": array for i, array in enumerate(drawn)}


def optax_step(tx: Any) -> Callable[..., Any]:
    """optax's update and its application as one function."""

    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def torch_step(
    name: str, options: dict[str, Any], kind: str, tensors: int
) -> Callable[[], Any]:
    """A step of torch's optimizer over equal tensors, on the GPU if JAX uses one."""
    import torch

    torch.set_num_threads(_cores())
    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    shape = (PARAMETERS // tensors,)
    params = [torch.randn(shape, device=device) for _ in range(tensors)]
    for param in params:
        param.grad = torch.randn(shape, device=device) * 1e-3
    opt = getattr(torch.optim, name)(params, **options, **{kind: True})

    def step() -> None:
        opt.step()
        if on_gpu:
            torch.cuda.synchronize()

    return step


def copy_bandwidth() -> float:
    """Bytes read and written per second by the fastest plain pass over the arrays."""
    # A factor other than 1, so that XLA cannot drop the pass.
    step = jax.jit(
        lambda tree: jax.tree.map(lambda x: x * 1.0001, tree), donate_argnums=0
    )
    held = [arrays(TENSORS[0], 1.0)]

    def copy() -> Any:
        held[0] = step(held[0])
        return held[0]

    return 2 * BYTES / race({"copy": copy}, rounds=20)["copy"].low


# --- inside a training step, where the optimizer is one part of the program ---

WIDTH, LAYERS, BATCH = 1024, 8, 256


def inside_training() -> Case:
    """The optimizer's share of a step of a multilayer perceptron, 8 M parameters."""
    keys = jax.random.split(jax.random.key(1), LAYERS)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
    inputs = jax.random.normal(jax.random.key(2), (BATCH, WIDTH))

    def loss(params: Any) -> jax.Array:
        hidden = inputs
        for w in params:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden**2)

    ours, theirs = CONTENDERS["Adam"][:2]
    kinds: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "jdist Adam": (ours.init, ours.step),
        "optax Adam": (theirs.init, optax_step(theirs)),
        "gradient only": (partial(jax.tree.map, jnp.copy), lambda p, g, s: (p, g)),
    }
    contenders = {
        name: _training(loss, weights, init, step)
        for name, (init, step) in kinds.items()
    }
    timings = race(contenders, rounds=20)
    alone = timings["gradient only"].median
    added = ", ".join(
        f"{name} adds {(t.median - alone) * 1e3:.1f} ms ({t.median / alone - 1:.0%})"
        for name, t in timings.items()
        if name != "gradient only"
    )
    title = f"training step, {LAYERS} layers of {WIDTH} x {WIDTH}, batch {BATCH}"
    return Case(title, timings, note=added)


def _training(
    loss: Callable[[Any], jax.Array],
    weights: Any,
    init: Callable[[Any], Any],
    step: Callable[..., Any],
) -> Callable[[], Any]:
    @jax.jit
    def train(params: Any, state: Any) -> Any:
        return step(params, jax.grad(loss)(params), state)

    compiled = jax.jit(train, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, weights), init(weights)]

    def call() -> Any:
        held[:] = compiled(*held)
        return held

    return call


def _ratios(timings: dict[str, Timing]) -> str:
    mine = timings["jdist"].median
    others = {k: t.median for k, t in timings.items() if k != "jdist"}
    return "jdist is " + ", ".join(f"{mine / t:.2f} of {k}" for k, t in others.items())


def _cores() -> int:
    return len(os.sched_getaffinity(0))
