"""Rules by name, each tuned over learning rates, and then trained with other seeds.

A rule is one compiled program, in which each half is a stage: seeds and rates are
mapped over, and the versions of each method and number of stages are an argument. What
has been found is written to a file for each of them, and read again by the next call:
an interrupted study goes on where it was.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._asynchronous import (
    compiled,
    images,
    language,
    rotation,
    rules,
    task,
)
from experiments._asynchronous.rules import PyTree, Rule
from experiments._asynchronous.task import Task
from experiments._result import write_whole
from jdist import optim, pipeline

SGD_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
ADAM_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
DISCOUNTED_RATES = tuple(10 * rate for rate in SGD_RATES)
"""With momentum 0.9 a rate that is discounted moves a tenth as far."""
MOMENTUM = 0.9
TOGETHER = 5
"""Runs that are mapped over at a time: the seeds of the full form."""


def _sgd(_: PyTree) -> optim.Optimizer:
    return optim.sgd(lr=1.0, momentum=MOMENTUM)


def _adam(_: PyTree) -> optim.Optimizer:
    return optim.adam(lr=1.0)


def _nadam(_: PyTree) -> optim.Optimizer:
    return optim.nadam(lr=1.0, betas=(0.99, 0.999))


ENDS = "table", "places", "patch", "head"
"""The weights of both ends of a network, which publications leave to Adam."""


def _matrices(params: PyTree, optimizer: optim.Optimizer) -> optim.Optimizer:
    """An optimizer for the matrices of halves, and Adam for the ends."""
    labels = [
        {name: "adam" if name in ENDS else "matrix" for name in own} for own in params
    ]
    return optim.by_label({"matrix": optimizer, "adam": _adam(params)}, labels)


def _muon(params: PyTree) -> optim.Optimizer:
    # With this adjustment the rates of Adam fit.
    muon = optim.muon(lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return _matrices(params, muon)


def _rotated(params: PyTree) -> optim.Optimizer:
    return _matrices(params, rotation.rotated_adam(lr=1.0))


@dataclass(frozen=True)
class Method:
    """A rule with its optimizer and the versions that micro-batches meet.

    Attributes:
      optimizer: The optimizer's name.
      rule: Makes a stage's rule, from its weights.
      versions: "stashing" and "vertical_sync" are those of PipeDream's schedule; "2bw"
        is w(t-1) and "flush" w(t) at all stages.
      rates: The grid of learning rates.
    """

    optimizer: str
    rule: Callable[[PyTree], Rule]
    versions: str
    rates: tuple[float, ...]

    @property
    def by_stages(self) -> bool:
        """Whether its results depend on the number of stages."""
        return self.versions in ("stashing", "vertical_sync")


def _stashed(make: Callable[[PyTree], optim.Optimizer]) -> Callable[[PyTree], Rule]:
    return lambda params: rules.stashed(make(params))


def _feedback(make: Callable[[PyTree], optim.Optimizer]) -> Callable[[PyTree], Rule]:
    return lambda params: rules.error_feedback(make(params))


def _predicted(
    make: Callable[[PyTree], optim.Optimizer],
    direction: rules.Direction,
    aim: rules.Aim,
) -> Callable[[PyTree], Rule]:
    return lambda params: rules.predicted(make(params), direction, aim=aim)


SYNC = "synchronous"
STASH, NONE, VERTICAL = "PipeDream", "no stashing", "vertical sync"
PIPEOPTIM, XPIPE = "PipeOptim", "XPipe"
PIPEMARE, NESTEROV = "PipeMare", "Nesterov (NAdam 0.99)"
ROTATION = "basis rotation"
TWO, FEEDBACK = "2BW", "2BW, error feedback"
MUON, MUON_TWO, MUON_FEEDBACK = "Muon, synchronous", "Muon, 2BW", "Muon, 2BW, feedback"
SGD, SGD_STASH = "SGD, synchronous", "SGD, PipeDream"
SPECTRAIN, DC, LOOK_AHEAD = "SGD, SpecTrain", "SGD, DC-ASGD-a", "SGD, Nesterov (10)"


ADAM, MUON_RULE, SGD_RULE = map(_stashed, (_adam, _muon, _sgd))
"""Rules of several methods, which differ in their versions."""


def _of_adam(rule: Callable[[PyTree], Rule], versions: str, name: str = "Adam") -> Any:
    return Method(name, rule, versions, ADAM_RATES)


def _of_sgd(rule: Callable[[PyTree], Rule], versions: str, rates: Any = None) -> Any:
    return Method("SGD", rule, versions, rates or SGD_RATES)


METHODS: dict[str, Method] = {
    SYNC: _of_adam(ADAM, "flush"),
    STASH: _of_adam(ADAM, "stashing"),
    NONE: _of_adam(lambda p: rules.unstashed(_adam(p)), "stashing"),
    VERTICAL: _of_adam(ADAM, "vertical_sync"),
    PIPEOPTIM: _of_adam(
        _predicted(_adam, rules.adam_direction, "own update"), "stashing"
    ),
    XPIPE: _of_adam(_predicted(_adam, rules.adam_direction, "round trip"), "stashing"),
    PIPEMARE: _of_adam(lambda p: rules.pipemare(_adam(p), anneal=100), "stashing"),
    NESTEROV: _of_adam(_stashed(_nadam), "stashing", "NAdam"),
    ROTATION: _of_adam(_stashed(_rotated), "stashing", "rotated Adam"),
    TWO: _of_adam(ADAM, "2bw"),
    FEEDBACK: _of_adam(_feedback(_adam), "2bw"),
    MUON: _of_adam(MUON_RULE, "flush", "Muon"),
    MUON_TWO: _of_adam(MUON_RULE, "2bw", "Muon"),
    MUON_FEEDBACK: _of_adam(_feedback(_muon), "2bw", "Muon"),
    SGD: _of_sgd(SGD_RULE, "flush"),
    SGD_STASH: _of_sgd(SGD_RULE, "stashing"),
    SPECTRAIN: _of_sgd(
        _predicted(_sgd, rules.momentum_direction, "round trip"), "stashing"
    ),
    DC: _of_sgd(
        lambda p: rules.compensated(_sgd(p), strength=1.0, adaptive=0.95), "stashing"
    ),
    LOOK_AHEAD: _of_sgd(
        lambda p: rules.look_ahead(momentum=MOMENTUM), "stashing", DISCOUNTED_RATES
    ),
}


class Study(NamedTuple):
    """What is trained.

    Attributes:
      task: The network and its data.
      stages: Numbers of stages.
      methods: Names of `METHODS`.
      seeds: The number of seeds whose results are shown.
      tuning: How many other seeds choose the learning rate.
      rates: How many learning rates of each grid, from its middle.
      seed: The first seed; those that tune come last.
    """

    task: Task
    stages: tuple[int, ...]
    methods: tuple[str, ...]
    seeds: int
    tuning: int
    rates: int
    seed: int = 0

    def grid(self, name: str) -> tuple[float, ...]:
        """The learning rates of a method."""
        every = METHODS[name].rates
        start = (len(every) - self.rates) // 2
        return every[start : start + self.rates]

    def cases(self) -> list[tuple[str, int]]:
        """Methods and numbers of stages; one number where it does not matter."""
        return [
            (name, stages)
            for name in self.methods
            for stages in (self.stages if METHODS[name].by_stages else self.stages[:1])
        ]


class Found(NamedTuple):
    """The runs of a method in a number of stages.

    Attributes:
      rates: The learning rates.
      tuned: Held-out losses at the end, `(rates, seeds that tune)`.
      losses: The same with the best rate and the seeds that are shown, `(seeds,)`.
      curve: Training losses of each update with the best rate, mean of these seeds.
    """

    rates: tuple[float, ...]
    tuned: np.ndarray
    losses: np.ndarray
    curve: np.ndarray

    @property
    def best(self) -> int:
        """The rate of the smallest mean loss; what diverged is the worst."""
        return _smallest(self.tuned)

    @property
    def is_at_edge(self) -> bool:
        """Whether the best rate is the smallest or the largest of several."""
        return len(self.rates) > 1 and self.best in (0, len(self.rates) - 1)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        arrays = {name: written(getattr(self, name)) for name in ARRAYS}
        return {"rates": self.rates, **arrays}


ARRAYS = "tuned", "losses", "curve"


def _smallest(tuned: np.ndarray) -> int:
    means = np.where(np.isfinite(tuned), tuned, np.inf).mean(axis=1)
    return int(np.argmin(means))


def versions_of(versions: str, stages: int, updates: int) -> np.ndarray:
    """The version that each update's micro-batch meets, `(stages, updates)`."""
    if versions in ("stashing", "vertical_sync"):
        policy: Any = versions
        return pipeline.pipedream(stages, updates, policy=policy).versions_used()
    late = 1 if versions == "2bw" else 0
    # The batch of an update stands for its micro-batches: they all meet one version,
    # and their mean gradient is the batch's.
    return np.tile(np.maximum(np.arange(updates) - late, 0), (stages, 1))


def program_of(name: str, given: Task, stages: int) -> compiled.Program:
    """The compiled form of a method."""
    method = METHODS[name]
    parts = task.cut(given.parameters(0), stages)
    return compiled.Program(
        task.staged(given, stages),
        given.losses,
        [method.rule(own) for own in parts],
        versions_of(method.versions, stages, given.steps),
    )


def trained(study: Study, name: str, stages: int) -> Found:
    """Tunes a method, and trains it with its best rate."""
    given, rates, method = study.task, study.grid(name), METHODS[name]
    program, mapped = _compiled(given, method.rule)
    order = program.order_of(versions_of(method.versions, stages, given.steps))
    end = study.seed + study.seeds
    pairs = [(rate, end + k) for rate in rates for k in range(study.tuning)]
    losses, _ = _runs(given, mapped, order, pairs)
    tuned = losses.reshape(len(rates), study.tuning)
    best = rates[_smallest(tuned)]
    pairs = [(best, seed) for seed in range(study.seed, end)]
    losses, curves = _runs(given, mapped, order, pairs)
    return Found(rates, tuned, losses, curves.mean(axis=0))


def program_of_halves(
    given: Task, rule: Rule | Sequence[Rule], updates: int
) -> compiled.Program:
    """The form that is compiled: each half is a stage.

    What a stage's weights see, and the rule's formulas for them, do not depend on where
    the stage ends: fewer stages are these with other versions.
    """
    # The longest rings: all stages are as late as the first.
    versions = versions_of("vertical_sync", given.halves, updates)
    stages = task.staged(given, given.halves)
    return compiled.Program(stages, given.losses, rule, versions)


@functools.lru_cache(maxsize=len(METHODS))
def _compiled(
    given: Task, rule: Callable[[PyTree], Rule]
) -> tuple[compiled.Program, Callable[..., Any]]:
    """A rule's program, and its runs: `(params, data, rates, order)`."""
    parts = task.cut(given.parameters(0), given.halves)
    program = program_of_halves(given, list(map(rule, parts)), given.steps)
    stages, tested = task.staged(given, given.halves), given.held_out()

    def run(
        params: PyTree, data: compiled.MicroBatches, rate: jax.Array, order: Any
    ) -> Any:
        found = program.with_order(order)(params, data, rate)
        value: Any = tested[given.input]
        for stage, own in zip(stages, found.params, strict=True):
            value = stage.fn(own, value)
        return given.losses(value, tested).mean(), found.losses

    # More optimisation takes longer than it saves.
    options = {"xla_backend_optimization_level": 1}
    mapped = jax.jit(jax.vmap(run, (0, 0, 0, None)), compiler_options=options)
    return program, mapped


def _runs(
    given: Task,
    mapped: Callable[..., Any],
    order: compiled.VersionOrder,
    pairs: Sequence[tuple[float, int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Held-out losses and training losses of runs, by rate and seed."""
    found = []
    for start in range(0, len(pairs), TOGETHER):
        some = pairs[start : start + TOGETHER]
        # Always as many, so that the program is compiled once.
        filled = [*some, *[some[-1]] * (TOGETHER - len(some))]
        params = _over(
            task.cut(given.parameters(seed), given.halves) for _, seed in filled
        )
        data = _over(given.training(seed) for _, seed in filled)
        rates = jnp.array([rate for rate, _ in filled], jnp.float32)
        both = mapped(params, data, rates, order)
        found.append([np.asarray(each)[: len(some)] for each in both])
    final, losses = (np.concatenate(each) for each in zip(*found, strict=True))
    return final, losses


def _over(trees: Iterable[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


# --- resuming ---


def resumed(study: Study, folder: Path, name: str, stages: int) -> tuple[Found, bool]:
    """`trained`, or what an earlier call with the same study and code has written.

    Returns:
      What was found, and whether it was read.
    """
    sizes = study.task, study.seeds, study.tuning, study.grid(name), study.seed
    told = repr((*sizes, name, stages))
    key = hashlib.sha256((told + _code()).encode()).hexdigest()[:16]
    path = folder / f"{key}.json"
    if path.exists():
        kept = json.loads(path.read_text())
        arrays = (np.array(kept[x], np.float64) for x in ARRAYS)
        return Found(tuple(kept["rates"]), *arrays), True
    found = trained(study, name, stages)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, {"method": name, "stages": stages, **found.record()})
    return found, False


def written(array: np.ndarray) -> Any:
    """An array as JSON, in which a loss that is not finite is null."""
    finite = np.asarray(array).astype(object)
    finite[~np.isfinite(array)] = None
    return finite.tolist()


def _code() -> str:
    """The sources that a result depends on."""
    own = [compiled, images, language, rotation, rules, task]
    files = [__file__, *(module.__file__ for module in own)]
    return "".join(Path(file).read_text() for file in files if file)
