"""Does the judge name the place of a defect in a transformer?

Random defects are planted inside the model (factors of values and of cotangents,
signs, dropout keys, padding masks, bfloat16, transposed weights, swapped layers, a
layer's old parameters) and in the sum of its gradients (micro-batches lost and doubled,
a lost sum over replicas, sums in bfloat16), under accumulation, data parallelism by
`vmap` and by `shard_map`, and a pipeline. Right programs, which differ in the order of
the examples, are judged as well.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import _traced_transformer as model
from experiments._result import Claim, Picture, Result, Settings
from experiments._traced_transformer import Switches, Trainer, Tree
from jdist import verify

EXAMPLES = model.EXAMPLES


@dataclass(frozen=True, slots=True)
class Part:
    """The numbers of programs in one dtype.

    Attributes:
      layers: The layers of the model.
      defects: The number of planted defects.
      right: The number of right programs beside them.
      demanded: The effect on a gradient above which a verdict is demanded: the relative
        distance of a leaf in the 2-norm.
    """

    layers: int
    defects: int
    right: int
    demanded: float


# In bfloat16 the rounding errors of twelve layers leave no digit of some leaves, so
# that the judge refuses a verdict. Three layers are judged.
PARTS = {
    "float32": Part(layers=12, defects=221, right=102, demanded=1e-4),
    "bfloat16": Part(layers=3, defects=45, right=102, demanded=0.5),
}
QUICK = {"float32": Part(layers=12, defects=13, right=4, demanded=1e-4)}

# The share of right places among the defects above that effect.
PLACED = 0.95


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a planted defect.

    Attributes:
      direction: As in `verify.Difference`.
      tap: The label of the tap; empty for any.
      examples: The affected examples; None for any.
    """

    direction: str
    tap: str = ""
    examples: tuple[int, ...] | None = None

    def is_named(self, found: Any) -> bool:
        """Whether the judge's difference is at this place."""
        if found is None or found.direction != self.direction:
            return False
        right_tap = not self.tap or found.tap == self.tap
        return right_tap and self.examples in (None, found.examples)


@dataclass(frozen=True)
class Program:
    """A trainer, right or with a defect.

    Attributes:
      kind: The kind of the defect; empty for a right program.
      trainer: The name of the trainer.
      run: `run(params, batch) -> (loss, gradient)`.
      place: The place of the defect; None for a right program.
    """

    kind: str
    trainer: str
    run: Callable[[Tree, Tree], tuple[Any, Tree]]
    place: Place | None


@dataclass(frozen=True, slots=True)
class Finding:
    """The judge's verdict on a program.

    Attributes:
      kind: As in `Program`.
      trainer: As in `Program`.
      dtype: The dtype of the parameters.
      size: The effect: the largest relative distance of a leaf of the gradient from the
        right trainer's, in the 2-norm.
      verdict: "found", "not judged" or "passed".
      placed: Whether the place is right.
      planted: The place, in words.
      named: The judge's place, in words.
    """

    kind: str
    trainer: str
    dtype: str
    size: float
    verdict: str
    placed: bool
    planted: str
    named: str


class Subject:
    """The model at a point, its trainers, and its planted defects.

    Attributes:
      dtype: The dtype of the parameters.
      layers: The number of layers.
      params: The parameters.
      batch: The batch.
      weights: Weights of the examples: their numbers of tokens.
    """

    def __init__(self, dtype: str, layers: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype, self.layers = dtype, layers
        self.params = model.parameters(self.rng, jnp.dtype(dtype), layers)
        self.batch, self.weights = model.examples(self.rng)
        self.trainers: dict[str, Trainer] = {
            "accumulation": model.accumulated,
            "data parallel": model.data_parallel,
            "shard_map": model.sharded,
            "pipeline": model.piped(),
        }

    def parts(self, trainer: str) -> int:
        """The number of parts into which a trainer divides the batch."""
        return model.REPLICAS if trainer in REPLICATED else model.MICRO_BATCHES

    def program(
        self,
        kind: str,
        trainer: str,
        place: Place | None,
        switches: Switches | None = None,
        shares: np.ndarray | None = None,
        change: Callable[[Tree], Tree] | None = None,
        **options: Any,
    ) -> Program:
        """A trainer with switches, shares and changed parameters.

        Args:
          kind: As in `Program`.
          trainer: As in `Program`.
          place: As in `Program`.
          switches: The switches; None for neutral ones.
          shares: Factors of the parts; None for 1 each.
          change: Maps the parameters to those that are used.
          options: Options of the trainer.
        """
        own = model.neutral(self.layers) if switches is None else switches
        each = np.ones(self.parts(trainer), np.float32) if shares is None else shares

        def run(params: Tree, batch: Tree) -> tuple[Any, Tree]:
            given = params if change is None else change(params)
            train = self.trainers[trainer]
            return train(given, batch, self.weights, own, each, **options)

        return Program(kind, trainer, run, place)

    # --- right programs ---

    def right(self, count: int, trainers: Sequence[str]) -> Iterator[Program]:
        """Yields trainers that take the examples in random orders."""
        for i in range(count):
            name = trainers[i % len(trainers)]
            order = self.rng.permutation(EXAMPLES)
            yield Program("", name, partial(self._permuted, name, order), None)

    def _permuted(self, name: str, order: np.ndarray, params: Tree, batch: Tree) -> Any:
        rows = jax.tree.map(lambda x: x[order], batch)
        each = np.ones(self.parts(name), np.float32)
        own, neutral = self.weights[order], model.neutral(self.layers)
        return self.trainers[name](params, rows, own, neutral, each)

    # --- defects ---

    def defects(self, count: int, trainers: Sequence[str]) -> Iterator[Program]:
        """Yields random defects of each kind in turn, in random trainers."""
        made = 0
        for plant in itertools.cycle(PLANTS[self.dtype]):
            if made == count:
                return
            for name in self.rng.permutation(list(trainers)):
                program = plant(self, str(name))
                if program is not None:
                    made += 1
                    yield program
                    break

    def switched(self, kind: str, trainer: str, values: dict[str, Any]) -> Program:
        """Sets switches of one random layer.

        Args:
          kind: The kind of the defect.
          trainer: The name of the trainer.
          values: Values by switch; the place follows from the name of the switch.
        """
        layer = int(self.rng.integers(self.layers))
        switches = model.neutral(self.layers)
        for name, value in values.items():
            changed = getattr(switches, name).copy()
            changed[layer] = value
            switches = switches._replace(**{name: changed})
        (name,) = values
        tap = "mlp" if name.startswith(("mlp", "rounded")) else "attention"
        direction = "backward" if name.endswith("back") else "forward"
        place = Place(direction, f"{tap}[{layer}]")
        return self.program(kind, trainer, place, switches)


# --- the kinds of defects: None where a trainer cannot have one ---

Plant = Callable[[Subject, str], Program | None]

REPLICATED = ("data parallel", "shard_map")


def _factor(factor: float) -> Plant:
    def plant(subject: Subject, trainer: str) -> Program:
        switch = ("attention", "mlp", "attention_back", "mlp_back")
        name = switch[subject.rng.integers(len(switch))]
        kind = "sign" if factor < 0 else f"factor {factor}"
        return subject.switched(kind, trainer, {name: factor})

    return plant


def _wrong_key(subject: Subject, trainer: str) -> Program:
    other = int(subject.rng.integers(100, 1000))
    return subject.switched("wrong key", trainer, {"other_key": other})


def _mask_ignored(subject: Subject, trainer: str) -> Program:
    return subject.switched("mask ignored", trainer, {"unmasked": True})


def _bfloat16(subject: Subject, trainer: str) -> Program:
    return subject.switched("bfloat16 inside", trainer, {"rounded": True})


def _layers(params: Tree, change: Callable[[str, jax.Array], jax.Array]) -> Tree:
    changed = {name: change(name, leaf) for name, leaf in params["layers"].items()}
    return {**params, "layers": changed}


def _transposed(subject: Subject, trainer: str) -> Program:
    layer = int(subject.rng.integers(subject.layers))
    weight = str(subject.rng.choice(["query", "key", "value", "out"]))

    def change(params: Tree) -> Tree:
        def one(name: str, leaf: jax.Array) -> jax.Array:
            return leaf.at[layer].set(leaf[layer].T) if name == weight else leaf

        return _layers(params, one)

    place = Place("forward", f"attention[{layer}]")
    return subject.program("transposed weight", trainer, place, change=change)


def _stale(subject: Subject, trainer: str) -> Program:
    layer, seed = (int(n) for n in subject.rng.integers(subject.layers, size=2))

    def change(params: Tree) -> Tree:
        # Seeded in each call: the judge rejects a trainer whose random numbers change.
        step = np.random.default_rng(seed)

        def one(name: str, leaf: jax.Array) -> jax.Array:
            moved = 1 + 0.01 * step.standard_normal(leaf.shape[1:])
            old = np.asarray(leaf[layer], np.float64) * moved
            return leaf.at[layer].set(jnp.asarray(old, leaf.dtype))

        return _layers(params, one)

    place = Place("forward", f"attention[{layer}]")
    return subject.program("stale parameters", trainer, place, change=change)


def _swapped(subject: Subject, trainer: str) -> Program:
    pair = subject.rng.choice(subject.layers, size=2, replace=False)
    first, second = sorted(pair.tolist())
    order = np.arange(subject.layers)
    order[[first, second]] = second, first

    def change(params: Tree) -> Tree:
        return _layers(params, lambda name, leaf: leaf[order])

    place = Place("forward", f"attention[{first}]")
    return subject.program("swapped layers", trainer, place, change=change)


def _shares(kind: str, share: float) -> Plant:
    """A defect of the result of one part: it is multiplied by `share`."""

    def plant(subject: Subject, trainer: str) -> Program | None:
        if trainer == "pipeline":
            return None  # it sums its micro-batches itself
        parts = subject.parts(trainer)
        shares = np.ones(parts, np.float32)
        lost = int(subject.rng.integers(parts))
        shares[lost] = share
        place = Place("gradient", examples=_examples_of(lost, parts))
        return subject.program(kind, trainer, place, shares=shares)

    return plant


def _lost_psum(subject: Subject, trainer: str) -> Program | None:
    if trainer not in REPLICATED:
        return None
    parts = subject.parts(trainer)
    shares = np.zeros(parts, np.float32)
    kept = int(subject.rng.integers(parts))
    shares[kept] = 1
    others = set(range(EXAMPLES)) - set(_examples_of(kept, parts))
    place = Place("gradient", examples=tuple(sorted(others)))
    return subject.program("lost psum", trainer, place, shares=shares)


def _narrow_sum(subject: Subject, trainer: str) -> Program | None:
    if trainer != "accumulation":
        return None
    place = Place("gradient")
    return subject.program("bfloat16 accumulation", trainer, place, narrow=True)


def _examples_of(part: int, parts: int) -> tuple[int, ...]:
    size = EXAMPLES // parts
    return tuple(range(part * size, (part + 1) * size))


# Defects whose effect is, or can be, far above the bounds of bfloat16.
_COARSE: tuple[Plant, ...] = (
    _factor(-1.0),
    _wrong_key,
    _mask_ignored,
    _transposed,
    _swapped,
    _shares("lost micro-batch", 0.0),
    _shares("doubled micro-batch", 2.0),
    _lost_psum,
)

PLANTS: dict[str, tuple[Plant, ...]] = {
    "float32": (
        *_COARSE,
        _factor(1.001),
        _factor(1.1),
        _bfloat16,
        _stale,
        _narrow_sum,
    ),
    "bfloat16": (*_COARSE, _factor(1.5)),
}


# --- the study ---


def run(settings: Settings, progress: Progress) -> Result:
    """Plants and judges in each dtype."""
    parts = QUICK if settings.quick else PARTS
    trainers = ["accumulation"]
    if not settings.quick:
        trainers += ["data parallel", "shard_map", "pipeline"]
    found: list[Finding] = []
    for dtype, part in parts.items():
        subject = Subject(dtype, part.layers, settings.seed)
        programs = list(subject.right(part.right, trainers))
        programs += subject.defects(part.defects, trainers)
        found += judged(subject, programs, progress)
    faults = [f for f in found if f.kind]
    rights = [f for f in found if not f.kind]
    return Result(
        claims=claims(faults, rights, parts.values()),
        pictures=[
            Picture("defects", "Each defect at its effect on a gradient.", plot(faults))
        ],
        tables={
            "Defects by kind": by_kind(faults),
            "Defects that passed, or in another place": odd(faults),
        },
        data={
            "defects": [asdict(f) for f in faults],
            "right": [asdict(f) for f in rights],
        },
        notes=[f"seed {settings.seed}"],
        files={"kinds.md": lambda path: path.write_text(_markdown(by_kind(faults)))},
    )


def judged(
    subject: Subject, programs: Sequence[Program], progress: Progress
) -> list[Finding]:
    """The findings of the judge on each program."""
    judge = verify.trace_judge(
        model.losses,
        subject.params,
        subject.batch,
        weights=subject.weights,
        finite_differences=False,
    )
    right = {
        name: subject.program("", name, None).run(subject.params, subject.batch)[1]
        for name in {program.trainer for program in programs}
    }
    found = []
    for program in progress.track(programs, description=f"judging {subject.dtype}"):
        results: list[Any] = []

        # The result is kept, so that the effect needs no second run.
        def once(params: Tree, batch: Tree, p: Any = program, r: Any = results) -> Any:
            r.append(p.run(params, batch))
            return r[-1]

        trace = judge(once)
        size = effect(right[program.trainer], results[0][1])
        verdict = "not judged" if trace.report.unjudged else "passed"
        if trace.report.failures:
            verdict = "found"
        # A place proves nothing unless the verdict is "found".
        place = program.place if verdict == "found" else None
        placed = place is not None and place.is_named(trace.difference)
        found.append(
            Finding(
                program.kind, program.trainer, subject.dtype, size, verdict, placed,
                str(program.place or ""), str(trace.difference or ""),
            )
        )  # fmt: skip
    return found


def effect(right: Tree, wrong: Tree) -> float:
    """The largest relative distance of a leaf, in the 2-norm."""

    def one(a: Any, b: Any) -> float:
        wide = [np.asarray(x, np.float64) for x in (a, b)]
        return float(np.linalg.norm(wide[1] - wide[0]) / np.linalg.norm(wide[0]))

    return max(jax.tree.leaves(jax.tree.map(one, right, wrong)))


# --- what is claimed, and shown ---


def claims(
    faults: Sequence[Finding], rights: Sequence[Finding], parts: Collection[Part]
) -> list[Claim]:
    """The claims of the experiment."""
    planted = sum(part.defects for part in parts)
    beside = sum(part.right for part in parts)
    able = [f for f in faults if f.size > PARTS[f.dtype].demanded]
    seen = [f for f in able if f.verdict == "found"]
    placed = [f for f in able if f.placed]
    condemned = [f for f in rights if f.verdict == "found"]
    blind = [f for f in rights if f.verdict == "not judged"]
    return [
        Claim(
            f"{planted} defects of {len({f.kind for f in faults})} kinds were planted, "
            f"beside {beside} right programs",
            (len(faults), len(rights)) == (planted, beside),
            f"{len(faults)} and {len(rights)}",
        ),
        Claim(
            "each defect with an effect above "
            + ", ".join(f"{p.demanded:g} in {name}" for name, p in PARTS.items())
            + " is found",
            bool(able) and len(seen) == len(able),
            f"{len(seen)} of {len(able)}",
            leads=True,
        ),
        Claim(
            f"of these, the place is right in {PLACED:.0%}",
            bool(able) and len(placed) >= PLACED * len(able),
            f"{len(placed)} of {len(able)}, {len(placed) / max(len(able), 1):.1%}",
            leads=True,
        ),
        Claim(
            "each right program is judged, without a false alarm",
            bool(rights) and not condemned and not blind,
            f"{len(condemned)} of {len(rights)}, {len(blind)} not judged",
            leads=True,
        ),
    ]


def by_kind(faults: Sequence[Finding]) -> list[list[str]]:
    """A table of found and placed defects by kind, with the range of effects."""
    rows = [["defect", "dtype", "planted", "effect", "found", "place right"]]
    for kind, dtype in dict.fromkeys((f.kind, f.dtype) for f in faults):
        own = [f for f in faults if (f.kind, f.dtype) == (kind, dtype)]
        sizes = [f.size for f in own]
        found = sum(f.verdict == "found" for f in own)
        effects = f"{min(sizes):.0e} to {max(sizes):.0e}"
        placed = sum(f.placed for f in own)
        rows.append([kind, dtype, str(len(own)), effects, str(found), str(placed)])
    return rows


def odd(faults: Sequence[Finding]) -> list[list[str]]:
    """A table of the defects that passed or were found elsewhere."""
    rows = [["defect", "dtype", "trainer", "effect", "verdict", "planted", "named"]]
    for f in faults:
        if f.verdict != "found" or not f.placed:
            said = [f.verdict, f.planted, f.named]
            rows.append([f.kind, f.dtype, f.trainer, f"{f.size:.1e}", *said])
    return rows


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(faults: Sequence[Finding]) -> Figure:
    """A row for each kind, a dot for each defect."""
    kinds = list(dict.fromkeys(f.kind for f in faults))
    figure, axes = plt.subplots(figsize=(7, 0.3 * len(kinds) + 1))
    groups = {
        "found, in its place": ("tab:green", ("found", True)),
        "found, elsewhere": ("tab:orange", ("found", False)),
        "passed": ("firebrick", ("passed", False)),
        "not judged": ("tab:blue", ("not judged", False)),
    }
    for text, (color, outcome) in groups.items():
        own = [f for f in faults if (f.verdict, f.placed) == outcome]
        rows = [kinds.index(f.kind) for f in own]
        axes.scatter([max(f.size, 1e-9) for f in own], rows, s=9, c=color, label=text)
    for part in PARTS.values():
        axes.axvline(part.demanded, color="0.7", linewidth=1)
    axes.set(xscale="log", xlabel="effect on the gradient")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
