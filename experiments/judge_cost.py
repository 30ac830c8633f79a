"""What does a verdict on a language model's gradient cost, in steps and in memory?

A GPT in plain JAX with a tied embedding is trained by two unequal micro-batches. The
judge is given four candidates: the right sum, the mean of the micro-batches' means, the
right sum with one matrix 1 % off, and that with a tied embedding whose lookup has no
gradient. Each size has a process of its own, in which nothing is compiled before the
first judgement. A step is the gradient of the whole batch, the median of six. What a
judgement takes cold is its time there, and what the first took longer than its repeat.
"""

import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import rpc, verify

RIGHT, GROSS, FINE, UNTIED = "right", "mean of means", "1 % off", "without lookup"
COLD = f"{RIGHT}, cold"
"""The first judgement of a process, which compiles."""
GIB = 2**30


class Size(NamedTuple):
    """A model and its batch.

    Attributes:
      layers: Transformer blocks.
      width: Features of a token.
      vocabulary: Rows of the embedding.
      tokens: Length of a sequence.
      examples: Sequences.
      scanned: Whether the blocks are a `scan` over stacked parameters.
    """

    layers: int
    width: int
    vocabulary: int
    tokens: int
    examples: int
    scanned: bool = False


SMALL = Size(2, 128, 1000, 64, 8)
SIZES = {
    "0.5 M": SMALL,
    "4 M": Size(4, 256, 4000, 128, 8),
    "4 M, scan": Size(4, 256, 4000, 128, 8, scanned=True),
    "14 M": Size(6, 384, 8000, 128, 8),
    "14 M, scan": Size(6, 384, 8000, 128, 8, scanned=True),
    "40 M": Size(8, 512, 28000, 128, 8),
    "40 M, scan": Size(8, 512, 28000, 128, 8, scanned=True),
    "124 M": Size(12, 768, 50257, 128, 8),
    "0.5 M, 64 examples": SMALL._replace(examples=64),
    "0.5 M, 256 examples": SMALL._replace(examples=256),
}
QUICK_SIZES = {"0.02 M": Size(1, 64, 50, 11, 5)}

# The most steps that a warm judgement may take, and as many again to explain a failure.
STEPS = {RIGHT: 15.0, GROSS: 2 * 15.0, FINE: 2 * 30.0, UNTIED: 2 * 30.0}
WARM = "14 M"
MANY = "0.5 M, 256 examples"
MANY_STEPS = 20.0
# The most seconds where nothing is compiled; of 14 M beyond the steps of a warm one.
COLD_SECONDS = {
    "0.5 M": {RIGHT: 12.0, GROSS: 20.0},
    "14 M": {RIGHT: 20.0},
    "124 M": {RIGHT: 300.0, GROSS: 300.0, FINE: 480.0, UNTIED: 480.0},
}
BEYOND = ("14 M",)
# The most seconds of a warm judgement of the smallest.
SMALL_SECONDS = 0.6
# The most memory beyond what the steps took, by the parameters' own bytes, and in all.
PARAMETERS, IN_ALL = 20.0, 12.0


class Cost(NamedTuple):
    """What the judge took for one size.

    Attributes:
      entries: Numbers of the parameters.
      step: Seconds of the gradient of the whole batch.
      seconds: Those of each judgement.
      verdicts: Whether each candidate passed.
      memory: Bytes of the process's peak beyond that of the steps.
      peak: Bytes of that peak.
    """

    entries: int
    step: float
    seconds: dict[str, float]
    verdicts: dict[str, bool]
    memory: int
    peak: int

    def steps(self, judged: str) -> float:
        """A judgement's time in steps."""
        return self.seconds[judged] / self.step

    def cold(self, judged: str, beyond: float = 0.0) -> float:
        """Its seconds where nothing is compiled, beyond some steps."""
        compiling = self.seconds[COLD] - self.seconds[RIGHT]
        return self.seconds[judged] + compiling - beyond * self.step

    @property
    def share(self) -> float:
        """The memory by the bytes of the parameters."""
        return self.memory / (4 * self.entries)


def run(settings: Settings, progress: Progress) -> Result:
    """Judges each size in a process of its own."""
    sizes = QUICK_SIZES if settings.quick else SIZES
    costs: dict[str, Cost] = {}
    for name, size in progress.track(sizes.items(), description="judging"):
        (costs[name],) = rpc.spawn(_measured, (size, settings.seed), nprocs=1)
    hurried = "time is judged in the full form only" if settings.quick else ""
    timed = (claim.unless(hurried) for claim in cost_claims(costs))
    return Result(
        claims=[*verdict_claims(costs), *timed],
        pictures=[
            Picture(
                "steps",
                "Time of a judgement over that of a step. Dashed: blocks in a `scan`.",
                plot(costs),
            )
        ],
        tables={"Cost of a verdict": table(costs)},
        data={name: cost._asdict() for name, cost in costs.items()},
        notes=["memory: the process's peak beyond that of the steps"],
    )


# --- one size, in a process of its own ---


def _measured(rank: int, size: Size, seed: int) -> Cost:
    params, losses, batch = model(size, seed)

    def share(p: Any, rows: jax.Array, **options: bool) -> jax.Array:
        return losses(p, rows, **options).sum() / size.examples

    gradient_of = jax.jit(jax.value_and_grad(share))
    untied_of = jax.jit(jax.value_and_grad(partial(share, tied=False)))
    mean_of = jax.jit(jax.value_and_grad(lambda p, b: losses(p, b).mean()))
    cut = size.examples * 5 // 8
    parts = slice(0, cut), slice(cut, None)

    def right(p: Any, b: jax.Array, gradient_of: Any = gradient_of) -> Any:
        first, second = (gradient_of(p, b[part]) for part in parts)
        return jax.tree.map(jnp.add, first, second)

    def gross(p: Any, b: jax.Array) -> Any:
        first, second = (mean_of(p, b[part]) for part in parts)
        return jax.tree.map(lambda x, y: (x + y) / 2, first, second)

    def fine(p: Any, b: jax.Array) -> Any:
        loss, gradient = right(p, b)
        gradient["blocks"][0]["out"] *= 1.01
        return loss, gradient

    untied = partial(right, gradient_of=untied_of)
    candidates: dict[str, Callable[..., Any]] = {
        RIGHT: right, GROSS: gross, FINE: fine, UNTIED: untied
    }  # fmt: skip
    step = statistics.median(_timed(partial(mean_of, params, batch)) for _ in range(6))
    for candidate in candidates.values():
        jax.block_until_ready(candidate(params, batch))
    before = _peak()
    judge = verify.gradients_judge(losses)
    seconds, verdicts = {}, {}
    for label, name in {COLD: RIGHT, **{x: x for x in candidates}}.items():
        start = time.perf_counter()
        report = judge(params, batch, {name: candidates[name]})
        seconds[label] = time.perf_counter() - start
        verdicts[name] = report.ok
    entries = sum(x.size for x in jax.tree.leaves(params))
    return Cost(entries, step, seconds, verdicts, _peak() - before, _peak())


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def model(size: Size, seed: int) -> tuple[Any, Callable[..., jax.Array], jax.Array]:
    """Parameters, the loss of each sequence, and random tokens."""
    width, keys = size.width, map(jax.random.key, itertools.count(seed))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def block() -> dict[str, jax.Array]:
        shapes = {"qkv": 3 * width, "out": width, "up": 4 * width}
        matrices = {name: normal(width, columns) for name, columns in shapes.items()}
        norms = {"norm": jnp.ones(width), "norm_up": jnp.ones(width)}
        return {**matrices, "down": normal(4 * width, width), **norms}

    blocks: Any = [block() for _ in range(size.layers)]
    if size.scanned:
        blocks = [jax.tree.map(lambda *x: jnp.stack(x), *blocks)]
    params = {
        "embedding": normal(size.vocabulary, width),
        "positions": normal(size.tokens, width),
        "blocks": blocks,
        "norm": jnp.ones(width),
    }
    shape = size.examples, size.tokens + 1
    tokens = jax.random.randint(next(keys), shape, 0, size.vocabulary)
    return params, partial(_losses, scanned=size.scanned), tokens


def _losses(
    params: Any, tokens: jax.Array, *, scanned: bool, tied: bool = True
) -> jax.Array:
    table = params["embedding"]
    rows = table if tied else jax.lax.stop_gradient(table)
    x = rows[tokens[:, :-1]] + params["positions"][None]
    if scanned:
        x, _ = jax.lax.scan(lambda x, p: (_block(p, x), None), x, params["blocks"][0])
    else:
        for each in params["blocks"]:
            x = _block(each, x)
    scores = jax.nn.log_softmax(_normed(x, params["norm"]) @ table.T)
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)
    return -chosen[..., 0].mean(axis=-1)


def _block(p: Any, x: jax.Array) -> jax.Array:
    examples, tokens, width = x.shape
    heads = (examples, tokens, width // 64, 64)
    query, key, value = (
        part.reshape(heads)
        for part in jnp.split(_normed(x, p["norm"]) @ p["qkv"], 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_normed(x, p["norm_up"]) @ p["up"]) @ p["down"]


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    variance = (x * x).mean(axis=-1, keepdims=True)
    return scale[None, None] * x * jax.lax.rsqrt(variance + 1e-5)


# --- what came out ---


def verdict_claims(costs: Mapping[str, Cost]) -> Iterator[Claim]:
    """That every size gets the right verdicts."""
    wanted = {RIGHT: True, GROSS: False, FINE: False, UNTIED: False}
    for name, passes in wanted.items():
        found = [cost.verdicts[name] == passes for cost in costs.values()]
        text = f"the candidate that is {name} {'passes' if passes else 'fails'}"
        yield Claim(text, all(found), f"{sum(found)} of {len(found)} sizes", leads=True)


def cost_claims(costs: Mapping[str, Cost]) -> Iterator[Claim]:
    """The goals in steps, in seconds and in memory."""
    for name, most in STEPS.items():
        text = f"{WARM}: {name}, warm, in {most:.0f} steps"
        yield _at_most(text, costs, WARM, most, partial(Cost.steps, judged=name))
    text = f"{MANY}: {RIGHT}, warm, in {MANY_STEPS:.0f} steps"
    yield _at_most(text, costs, MANY, MANY_STEPS, lambda c: c.steps(RIGHT))
    text = f"0.5 M: {RIGHT}, warm, in {SMALL_SECONDS} s"
    yield _at_most(text, costs, "0.5 M", SMALL_SECONDS, lambda c: c.seconds[RIGHT])
    for size, each in COLD_SECONDS.items():
        for name, most in each.items():
            more = STEPS[name] if size in BEYOND else 0.0
            steps = f" and {more:.0f} steps" if more else ""
            text = f"{size}: {name}, with all compilation, in {most:.0f} s{steps}"
            yield _at_most(
                text, costs, size, most, partial(Cost.cold, judged=name, beyond=more)
            )
    text = f"14 M: memory of {PARAMETERS:.0f} times the parameters"
    yield _at_most(text, costs, "14 M", PARAMETERS, lambda c: c.share)
    text = f"124 M: memory of {IN_ALL:.0f} GiB in all"
    yield _at_most(text, costs, "124 M", IN_ALL, lambda c: c.peak / GIB)


def _at_most(
    text: str,
    costs: Mapping[str, Cost],
    size: str,
    most: float,
    figure: Callable[[Cost], float],
) -> Claim:
    if size not in costs:
        return Claim(text, None, "", "not run in this form")
    found = figure(costs[size])
    return Claim(text, found <= most, f"{found:.1f}")


def table(costs: Mapping[str, Cost]) -> Sequence[Sequence[str]]:
    """A row for each size."""
    rows = [["size", "a step", COLD, *STEPS, "memory"]]
    for name, cost in costs.items():
        cold = f"{cost.seconds[COLD]:.1f} s"
        warm = (f"{cost.seconds[x]:.1f} s = {cost.steps(x):.0f} steps" for x in STEPS)
        beyond = f"{cost.memory / GIB:.1f} GiB = {cost.share:.0f} x"
        memory = f"{beyond}, {cost.peak / GIB:.1f} GiB in all"
        rows.append([name, f"{cost.step:.3g} s", cold, *warm, memory])
    return rows


def plot(costs: Mapping[str, Cost]) -> Figure:
    """A line for each candidate, over the parameters and over the examples."""
    figure, (by_size, by_examples) = plt.subplots(
        1, 2, figsize=(11, 4.5), sharey=True, layout="constrained"
    )
    known = SIZES | QUICK_SIZES
    sized = [(known[name], cost) for name, cost in costs.items()]
    eight = [(size, cost) for size, cost in sized if size.examples <= SMALL.examples]
    small = [(s, c) for s, c in sized if s._replace(examples=SMALL.examples) == SMALL]
    for number, judged in enumerate((COLD, *STEPS)):
        unrolled, scanned = (
            [(c.entries, c.steps(judged)) for s, c in eight if s.scanned == scan]
            for scan in (False, True)
        )
        many = [(size.examples, cost.steps(judged)) for size, cost in small]
        for axes, points, style in (
            (by_size, unrolled, "o-"), (by_size, scanned, "o--"),
            (by_examples, many, "o-"),
        ):  # fmt: skip
            if points:
                place = tuple(zip(*sorted(points), strict=True))
                axes.loglog(*place, style, color=f"C{number}", label=judged)
    by_size.set_ylabel("steps")
    by_size.set_xlabel(f"parameters; {SMALL.examples} examples")
    by_examples.set_xlabel("examples; 0.5 M parameters")
    by_examples.legend()
    return figure
