"""What does data parallelism cost beside the plain gradient of the whole batch?

Several CPU devices of one process share its threads, so no speed-up can show here: the
question is what sharding, weighting and reducing add. torch computes the whole batch on
the same threads. The judge, without finite differences, is timed as well.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh

from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, race
from jdist import data_parallel, optim, verify


def measure() -> list[Case]:
    """A model too small to measure computation, and one that is large enough."""
    return [
        _training(4, 2, 8, calls=200),
        _training(512, 4, 256, calls=2),
        _alone(512, 4, 256, calls=2, goal=1.01),
        # Nothing to compute: this measures the call itself, in Python and in JAX.
        _alone(4, 2, 8, calls=200, goal=1.5),
        _convolutions(32, 16, parts=4),
        _judgement(),
    ]


def _training(width: int, layers: int, examples: int, calls: int) -> Case:
    params, batch = _problem(width, layers, examples)
    plain = jax.jit(jax.value_and_grad(lambda p, b: _losses(p, b).mean()))
    contenders: dict[str, Callable[[], Any]] = {
        "jax.value_and_grad": lambda: plain(params, batch)
    }
    places: dict[str, dict[str, Any]] = {"2 replicas, vmap": {"replicas": 2}}
    if jax.device_count() > 1:
        mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
        places["2 devices"] = {"mesh": mesh}
    for name, where in places.items():
        fn = data_parallel.value_and_grad(_losses, **where)
        shards = data_parallel.shard_batch(batch, **where)
        contenders[name] = partial(fn, params, *shards)
    if jax.devices()[0].platform == "cpu":
        contenders["torch autograd"] = _torchs(params, batch)
    timings = race(contenders, calls=calls)
    # Forward, gradient of the weights, and cotangents of all but the first layer.
    flops = 2 * examples * width**2 * (3 * layers - 1)
    return Case(
        f"gradient, {layers} layers of {width}, {examples} examples",
        timings,
        limit=flops / _peak(),
        note=f"torch with {torch.get_num_threads()} threads; the limit is the rate of "
        f"a 2048 x 2048 product, measured in the same run",
    )


def _alone(width: int, layers: int, examples: int, calls: int, goal: float) -> Case:
    """A training step on one device; the plain one twice, which shows the noise."""
    params, batch = _problem(width, layers, examples)
    opt = optim.sgd(lr=1e-3, momentum=0.9)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: _losses(p, batch).mean())(params)
        return opt.step(params, grads, opt_state), loss

    plain = jax.jit(step, donate_argnums=0)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    contenders: dict[str, Callable[[], Any]] = {}
    for name in ("plain jitted step", "the same again"):
        # A copy for each contender, because the steps donate their state.
        own = jax.tree.map(jnp.copy, params)
        contenders[name] = _repeated(plain, (own, opt.init(own)), batch)
    places: dict[str, dict[str, Any]] = {
        "a mesh of one": {"mesh": mesh},
        "1 replica": {"replicas": 1},
    }
    for name, where in places.items():
        trained = data_parallel.train_step(_losses, opt, **where)
        shards, _ = data_parallel.shard_batch(batch, **where)
        name = f"train_step, {name}"
        contenders[name] = _repeated(trained, trained.init(params), shards)
    timings = race(contenders, calls=calls, rounds=60)
    plain_step = timings["plain jitted step"]
    return Case(
        f"training step alone, {layers} layers of {width}, {examples} examples",
        timings,
        note="SGD with momentum",
        goals=[
            Goal(f"of the plain step, {name}", ratio(timings[name], plain_step), goal)
            for name in timings
            if name.startswith("train_step")
        ],
    )


def _convolutions(images: int, size: int, parts: int) -> Case:
    """Three convolutions: a batch as a whole and in micro-batches, one after another.

    XLA's CPU compiler computes the gradient of a kernel slowly in a loop, as a scan
    written by hand shows.
    """
    rng = np.random.default_rng(0)
    shapes = [(3, 3, 3, 16), (3, 3, 16, 32), (3, 3, 32, 32)]
    params = [jnp.asarray(rng.normal(size=s) / 10, jnp.float32) for s in shapes]
    batch = jnp.asarray(rng.normal(size=(images, size, size, 3)), jnp.float32)
    opt = optim.sgd(lr=1e-3)

    def losses(params: Any, x: jax.Array) -> jax.Array:
        for window in params:
            x = jax.lax.conv_general_dilated(
                x, window, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return jnp.mean(x**2, axis=(1, 2, 3))

    grad = jax.value_and_grad(lambda params, x: losses(params, x).mean())

    def scanned(state: Any, batch: jax.Array) -> Any:
        def turn(total: Any, x: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, x)), None

        params, opt_state = state
        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        rows = batch.reshape(parts, -1, *batch.shape[1:])
        (loss, grads), _ = jax.lax.scan(turn, start, rows)
        grads = jax.tree.map(lambda g: g / parts, grads)
        return opt.step(params, grads, opt_state), loss / parts

    contenders: dict[str, Callable[[], Any]] = {}
    for name, count in (("whole", 1), (f"accumulate={parts}", parts)):
        step = data_parallel.train_step(losses, opt, replicas=1, accumulate=count)
        contenders[f"train_step, {name}"] = _repeated(step, step.init(params), batch)
    contenders[f"a scan over {parts} parts"] = _repeated(
        jax.jit(scanned), (params, opt.init(params)), batch
    )
    contenders[f"torch, {parts} backward passes"] = _torch_convolutions(
        params, batch, parts
    )
    timings = race(contenders, rounds=10)
    whole, accumulated, *_ = timings.values()
    return Case(
        f"convolutions, {images} images of {size} x {size}",
        timings,
        note=f"SGD; torch with {torch.get_num_threads()} threads",
        goals=[Goal("of the whole batch, accumulated", ratio(accumulated, whole), 1.1)],
    )


def _repeated(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], Any]:
    """Repeats a training step that donates its state."""
    kept = [state]

    def call() -> Any:
        kept[0], rest = step(kept[0], batch)
        return kept[0], rest

    return call


@cache
def _peak() -> float:
    """FLOP per second of a large float32 matrix product."""
    size = 2048
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    timing = race({"product": lambda: product(x, x)}, rounds=10)["product"]
    return 2 * size**3 / timing.median


def _judgement() -> Case:
    params, batch = _problem(64, 2, 64)
    plain = jax.jit(jax.value_and_grad(lambda p, b: _losses(p, b).mean()))
    judged = verify.gradients_judge(_losses)
    candidates = {"plain": plain}
    contenders = {
        "verify.gradients_judge": lambda: judged(
            params, batch, candidates, finite_differences=False
        ),
        "jax.value_and_grad": lambda: plain(params, batch),
    }
    return Case("judgement, 2 layers of 64, 64 examples", race(contenders))


def _problem(width: int, layers: int, examples: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)

    params = {f"w{i}": normal(width, width) for i in range(layers)}
    return params, (normal(examples, width), normal(examples, width))


def _losses(params: Mapping[str, jax.Array], batch: Any) -> jax.Array:
    hidden, target = batch
    for weight in params.values():
        hidden = jax.nn.relu(hidden @ weight)
    return jnp.mean((hidden - target) ** 2, axis=1)


def _torchs(params: Mapping[str, jax.Array], batch: Any) -> Callable[[], Any]:
    weights = [torch.tensor(np.asarray(w), requires_grad=True) for w in params.values()]
    x, y = (torch.tensor(np.asarray(part)) for part in batch)

    def step() -> float:
        hidden = x
        for weight in weights:
            weight.grad = None
            hidden = torch.relu(hidden @ weight)
        loss = ((hidden - y) ** 2).mean(dim=1).mean()
        loss.backward()
        return loss.item()

    return step


def _torch_convolutions(
    params: Sequence[jax.Array], batch: jax.Array, parts: int
) -> Callable[[], Any]:
    kernels = [
        torch.tensor(np.asarray(w).transpose(3, 2, 0, 1), requires_grad=True)
        for w in params
    ]
    rows = torch.tensor(np.asarray(batch).transpose(0, 3, 1, 2)).chunk(parts)
    opt = torch.optim.SGD(kernels, lr=1e-3)

    def step() -> float:
        opt.zero_grad()
        total = 0.0
        for x in rows:
            for kernel in kernels:
                x = torch.relu(torch.conv2d(x, kernel, padding="same"))
            loss = (x**2).mean() / parts
            loss.backward()
            total += loss.item()
        opt.step()
        return total

    return step
