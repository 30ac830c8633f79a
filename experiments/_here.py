"""What was proved on CPUs, on the devices of this machine: equality, bits, speed.

Gradients are compared with the one-device gradient within the judge's bound. Bits are
compared on deterministic devices: on a GPU only with
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`. Speed is judged on accelerators only,
because devices of one CPU share its cores.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim, pipeline, verify
from jdist.segment import segment

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def run(settings: Settings, progress: Progress) -> Result:
    """Every claim that the available devices can show."""
    devices = jax.devices()[: settings.devices]
    width, rows = (64, 32) if settings.quick else (2048, 4096)
    task = progress.add_task("running", total=4)
    problem = drawn(width, rows, settings.seed)
    claims = list(equality(problem, devices))
    progress.advance(task)
    claims += bits(problem, devices)
    progress.advance(task)
    shares = optimizers(settings)
    claims += bandwidth(shares, devices)
    progress.advance(task)
    paces = speeds(problem, devices, 3 if settings.quick else 20)
    claims += faster(paces, devices)
    progress.advance(task)
    return Result(
        claims=claims,
        pictures=[
            Picture(
                "here", "Milliseconds of a step, median, on these devices.", plot(paces)
            )
        ],
        data={
            "devices": [str(device) for device in devices],
            "kinds": sorted({device.device_kind for device in devices}),
            "flags": os.environ.get("XLA_FLAGS", ""),
            "share_of_copy": shares,
            "step_seconds": paces,
        },
        notes=[f"{len(devices)} devices: {devices[0].device_kind}."],
    )


# --- the problem ---


def layer(params: Any, x: jax.Array) -> jax.Array:
    """Half of the model; it uses a parameter twice."""
    h = jnp.tanh(x @ params["w"])
    return h + jnp.tanh(h @ params["w"]) * params["b"][None]


def squares(y: jax.Array, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    return jnp.square(y - batch["target"]).sum(-1)


def losses(params: Any, batch: Any) -> jax.Array:
    """The whole model on one device, `(examples,)`."""
    return squares(layer(params[1], layer(params[0], batch["x"])), batch)


def drawn(width: int, rows: int, seed: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Random float32 parameters of two layers, and a batch."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)

    params = [{"w": normal(width, width), "b": normal(width)} for _ in range(2)]
    return params, {"x": normal(rows, width), "target": normal(rows, width)}


# --- equality ---


def candidates(devices: list[jax.Device]) -> dict[str, Callable[..., Any]]:
    """Functions that compute the gradient of the mean loss, by name."""
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    replicas = data_parallel.value_and_grad(losses, mesh)
    halves = segment(lambda params, batch: losses(params, batch).mean())

    def by_replicas(params: Any, batch: Any) -> Any:
        return replicas(params, *data_parallel.shard_batch(batch, mesh))

    def by_halves(params: Any, batch: Any) -> Any:
        loss, residuals = halves.forward(params, batch)
        return loss, halves.backward(params, residuals, jnp.ones_like(loss))[0]

    pipe = piped([devices[0], devices[-1]])

    def by_stages(params: Any, batch: Any) -> Any:
        return pipe.value_and_grad(pipe.place(params), batch)

    return {"segment": by_halves, "data parallel": by_replicas, "pipeline": by_stages}


def piped(places: list[jax.Device]) -> pipeline.Pipeline:
    """A 1F1B pipeline with the two layers as stages."""
    stages = [
        pipeline.Stage(layer, ("x",), ("h",)),
        pipeline.Stage(layer, ("h",), ("y",)),
    ]
    return pipeline.Pipeline(stages, squares, pipeline.one_f_one_b(2, 4), places)


def equality(problem: Any, devices: list[jax.Device]) -> Iterator[Claim]:
    """Claims that each gradient equals that of the whole batch, within the bound."""
    params, batch = problem
    ways = candidates(devices)
    report = verify.gradients(losses, params, batch, ways)
    for name in ways:
        one = report.of(name)
        text = f"{name}: the gradient is the one-device gradient, within the bound"
        yield Claim(text, one.ok, f"{one.worst:.2f} of the bound at most", leads=True)


def bits(problem: Any, devices: list[jax.Device]) -> Iterator[Claim]:
    """Claims that results repeat to the last bit."""
    params, batch = problem
    why = ""
    if devices[0].platform in ("gpu", "cuda") and DETERMINISTIC not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        why = (
            f"the compiler was not told to be deterministic: XLA_FLAGS={DETERMINISTIC}"
        )
    for name, fn in candidates(devices).items():
        one, again = (jax.tree.leaves(fn(params, batch)) for _ in range(2))
        same = all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
        text = f"{name}: two calls give the same bits"
        yield Claim(text, same, f"{len(one)} arrays").unless(why)
    text = "a pipeline over two devices gives the bits of one over a single device"
    if len(devices) < 2:
        yield Claim(text, None, "", why_not="there is one device")
        return
    found = []
    for places in (devices[:2], [devices[0]] * 2):
        pipe = piped(list(places))
        found.append(jax.tree.leaves(pipe.value_and_grad(pipe.place(params), batch)))
    same = all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    yield Claim(text, same, f"{len(found[0])} arrays").unless(why)


# --- speed ---


def seconds(step: Callable[[], Any], repeats: int) -> float:
    """The median seconds of a step, after two runs that compile and settle."""
    for _ in range(2):
        jax.block_until_ready(step())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def optimizers(settings: Settings) -> dict[str, float]:
    """For each optimizer, the share of a copy's bandwidth that its step reaches."""
    count, repeats = (2**16, 5) if settings.quick else (2**26, 20)
    array = jnp.ones(count, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copied = 2 * array.nbytes / seconds(lambda: copy(array), repeats)
    found = {}
    # The number of passes over memory: parameters, gradients and states, in and out.
    for name, passes in (("sgd", 3), ("adam", 7)):
        opt = getattr(optim, name)(lr=1e-3)
        step = jax.jit(opt.step, donate_argnums=(0, 2))
        state = {"now": (jnp.ones_like(array), opt.init(array))}

        def one(step: Callable[..., Any] = step, state: dict[str, Any] = state) -> Any:
            params, kept = state["now"]
            state["now"] = step(params, array, kept)
            return state["now"]

        found[name] = passes * array.nbytes / seconds(one, repeats) / copied
    return found


def bandwidth(shares: dict[str, float], devices: list[jax.Device]) -> Iterator[Claim]:
    """Claims on optimizers: memory traffic should dominate their steps."""
    for name, share in shares.items():
        text = f"{name} steps at half of the bandwidth of a copy or more"
        yield Claim(text, share >= 0.5, f"{share:.0%}").unless(_no_speed(devices))


def speeds(
    problem: Any, devices: list[jax.Device], repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds of a gradient of the same batch, by method and number of devices."""
    params, batch = problem
    found: dict[str, dict[str, float]] = {"data parallel": {}, "pipeline": {}}
    for count in sorted({1, len(devices)}):
        mesh = jax.sharding.Mesh(np.array(devices[:count]), ("data",))
        fn = data_parallel.value_and_grad(losses, mesh)
        given = (
            data_parallel.replicate(params, mesh),
            *data_parallel.shard_batch(batch, mesh),
        )
        taken = seconds(lambda fn=fn, given=given: fn(*given), repeats)  # type: ignore[misc]
        found["data parallel"][str(count)] = taken
    for count in sorted({1, min(2, len(devices))}):
        pipe = piped([devices[0], devices[count - 1]])
        placed = pipe.place(params)
        taken = seconds(
            lambda pipe=pipe, placed=placed: pipe.value_and_grad(placed, batch),  # type: ignore[misc]
            repeats,
        )
        found["pipeline"][str(count)] = taken
    return found


def faster(
    paces: dict[str, dict[str, float]], devices: list[jax.Device]
) -> Iterator[Claim]:
    """Claims that more devices take less time."""
    for name, found in paces.items():
        one, *more = found.values()
        last = more[-1] if more else one
        text = f"{name}: several devices are faster than one"
        why = _no_speed(devices) or ("" if more else "there is one device")
        yield Claim(text, last < one, f"{one / last:.2f} times").unless(why)


def _no_speed(devices: list[jax.Device]) -> str:
    if devices[0].platform == "cpu":
        return "devices of one CPU share its cores and its memory"
    return ""


def plot(paces: dict[str, dict[str, float]]) -> Figure:
    """A chart with a bar for each method and number of devices."""
    figure, axes = plt.subplots(figsize=(6, 3))
    bars = {
        f"{name}, {count}": taken * 1e3
        for name, found in paces.items()
        for count, taken in found.items()
    }
    axes.barh(list(bars), list(bars.values()))
    axes.set_xlabel("ms of a step, by the number of devices")
    return figure
