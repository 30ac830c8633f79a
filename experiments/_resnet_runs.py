"""Training a cut network in every arrangement: what comes out, and how long it takes.

On CPU each stage has its own process, pinned to a core; elsewhere all devices are in
this process. One device runs the whole network as one compiled step. The others are
`Pipeline`s: without a split, one stage waits while the other works (model parallelism);
with it, the stages work on different parts of the batch.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments._resnet import Network
from jdist import optim, pipeline, rpc
from jdist.pipeline import FromModules

ONE = "one device"
PARALLEL = "model parallel"
JUDGED, DEALT = "the parts", "other parts"
NAMES = ("stage0", "stage1")
PATIENCE = 600.0
"""Seconds for which a process waits while the other compiles."""

Batch = dict[str, np.ndarray]
Step = Callable[[Batch], Any]
"""A training step; returns arrays to wait for."""
SGD = optim.sgd(lr=0.001)


class Plan(NamedTuple):
    """The parameters of an experiment.

    Attributes:
      network: The network.
      image: Height and width of the images.
      batch: Examples in a batch.
      splits: Sizes of the parts of a batch.
      checked: The split sizes whose results are compared; the gradient of the first is
        judged.
      batches: Batches in a run.
      runs: Timed runs.
      seed: Seed of all random numbers.
    """

    network: Network
    image: int
    batch: int
    splits: tuple[int, ...]
    checked: tuple[int, ...]
    batches: int = 3
    runs: int = 10
    seed: int = 0

    def data(self) -> list[Batch]:
        """Random images and one-hot classes."""
        rng = np.random.default_rng((self.seed, 1))
        shape = (self.batch, self.image, self.image, 3)
        classes = np.eye(self.network.classes, dtype=np.float32)
        return [
            {
                "x": rng.normal(size=shape).astype(np.float32),
                "target": classes[rng.integers(len(classes), size=self.batch)],
            }
            for _ in range(self.batches)
        ]

    def dealt(self) -> Batch:
        """The first batch, permuted so that every part has different examples."""
        order = np.arange(self.batch).reshape(-1, self.checked[0]).T.ravel()
        return {name: x[order] for name, x in self.data()[0].items()}

    def label(self, split: int) -> str:
        """The name of the pipeline with parts of size `split`."""
        return PARALLEL if split == self.batch else f"split {split}"


class Found(NamedTuple):
    """Results by arrangement; arrays of a stage in another process are None.

    Attributes:
      losses: Losses of the first batch, in parts of the judged size and permuted.
      gradients: Gradients of the same, for each stage.
      trained: Parameters and statistics of each stage after a run.
      expected: The same of both stages on one device, part by part.
      seconds: Seconds of each timed run.
    """

    losses: dict[str, float]
    gradients: dict[str, list[Any]]
    trained: dict[str, list[Any]]
    expected: dict[str, list[Any]]
    seconds: dict[str, list[float]]


def squared_error(y: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """The mean squared error over the classes, for each example."""
    return ((y - batch["target"]) ** 2).mean(-1)


def losses_of(stages: Sequence[pipeline.Stage], states: Sequence[Any]) -> Any:
    """Returns a function of `(params, parts)`: the loss of each part on one device.

    A part is normalised by its own statistics, so that the judge treats a batch of
    parts as it treats a batch of examples elsewhere.
    """

    def loss_of(params: Any, part: Any) -> jax.Array:
        # The judge calls this in a wider dtype, too.
        kind = part["x"].dtype
        before = jax.tree.map(lambda x: x.astype(kind), states)
        h, _ = stages[0].fn(params[0], before[0], part["x"])
        y, _ = stages[1].fn(params[1], before[1], h)
        return squared_error(y, part).mean()

    return jax.vmap(loss_of, in_axes=(None, 0))


# --- where the stages are ---


def over_processes(plan: Plan, pinned: bool) -> rpc.Processes:
    """Starts a process for each stage; `joined` waits for them."""
    limit = 4 * PATIENCE
    pin = 1 if pinned else 0
    return rpc.spawn(_work, (plan,), 2, pin=pin, timeout=limit, join=False)


def joined(processes: rpc.Processes) -> Found:
    """Merges the results of both processes; the longer time of the two counts."""
    first, second = processes.join()

    def of_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        return {name: [one[name][0], other[name][1]] for name in one}

    return Found(
        first.losses,
        of_both(first.gradients, second.gradients),
        of_both(first.trained, second.trained),
        first.expected | second.expected,
        {
            name: np.maximum(taken, second.seconds[name]).tolist()
            for name, taken in first.seconds.items()
        },
    )


def _work(rank: int, plan: Plan) -> Found:
    """The process of one stage; the first one also runs the one-device network."""
    rpc.init_rpc(NAMES[rank], allow=("experiments",))
    rpc.set_rpc_timeout(PATIENCE)
    wait = functools.partial(rpc.barrier, timeout=PATIENCE)
    found = found_by(plan, pipeline.Workers(NAMES), wait, rank)
    rpc.shutdown()
    return found


def found_by(
    plan: Plan,
    where: pipeline.Workers | Sequence[jax.Device],
    wait: Callable[[], None] = lambda: None,
    rank: int | None = None,
) -> Found:
    """The results of this process with its share of the stages.

    Args:
      plan: The parameters.
      where: Two devices of this process; or the workers, of which it is one.
      wait: A barrier of all processes.
      rank: The rank of this process; None if it is the only one.
    """
    made, batches = plan.network.stages(plan.seed), plan.data()
    found = Found({}, {}, {}, {}, {})
    for turn, split in enumerate(plan.checked):
        name, pipe = plan.label(split), _pipe(plan, made, split, where)
        if not turn:
            _differentiate(pipe, made, {JUDGED: batches[0], DEALT: plan.dealt()}, found)
        found.trained[name] = _trained(pipe, made, batches)
        if rank in (None, turn % 2):  # divides the reference runs among the processes
            pipe = _pipe(plan, made, split, None)
            found.expected[name] = _trained(pipe, made, batches)
    steps = _steps(plan, made, where, alone=rank in (None, 0))
    found.seconds.update(_timed(plan, steps, batches, wait))
    return found


# --- the arrangements ---


def _pipe(plan: Plan, made: FromModules, split: int, where: Any) -> pipeline.Pipeline:
    """A GPipe pipeline: all forward passes, then all backward passes."""
    schedule = pipeline.gpipe(2, plan.batch // split)
    return pipeline.Pipeline(made.stages, squared_error, schedule, where, optimizer=SGD)


def _differentiate(
    pipe: pipeline.Pipeline,
    made: FromModules,
    batches: Mapping[str, Batch],
    found: Found,
) -> None:
    """Adds the loss and the gradients of each batch to `found`."""
    params, states = pipe.place(made.params), pipe.place(made.states)
    for name, batch in batches.items():
        loss, grads, _ = pipe.value_and_grad(params, batch, states=states)
        found.losses[name], found.gradients[name] = float(loss), _host(grads)


def _trained(
    pipe: pipeline.Pipeline, made: FromModules, batches: Sequence[Batch]
) -> list[Any]:
    """Parameters and statistics after a run, of each local stage."""
    state = pipe.init(made.params, made.states)
    for batch in batches:
        state, _ = pipe.train_step(state, batch)
    return _host(zip(state.params, state.states, strict=True))


def _host(stages: Any) -> list[Any]:
    """The arrays of each stage as NumPy arrays; None for a stage without any."""
    leaves = [jax.tree.leaves(tree) for tree in stages]
    return [[np.asarray(leaf) for leaf in own] or None for own in leaves]


def _steps(
    plan: Plan, made: FromModules, where: Any, *, alone: bool
) -> dict[str, Step]:
    """Every arrangement as a step that can be repeated.

    Args:
      plan: The parameters.
      made: The stages.
      where: Their places.
      alone: Whether this process runs the one-device network; otherwise it waits.
    """
    one = _on_one_device(made) if alone else lambda batch: None
    return {ONE: one} | {
        plan.label(split): _over_stages(_pipe(plan, made, split, where), made)
        for split in (plan.batch, *plan.splits)
    }


def _on_one_device(made: FromModules) -> Step:
    """The whole network as one compiled step that donates its state."""

    def loss_of(params: Any, states: Any, batch: Batch) -> tuple[jax.Array, Any]:
        h, front = made.stages[0].fn(params[0], states[0], batch["x"])
        y, back = made.stages[1].fn(params[1], states[1], h)
        return squared_error(y, batch).mean(), [front, back]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(held: Any, batch: Batch) -> Any:
        params, states, kept = held
        grads, states = jax.grad(loss_of, has_aux=True)(params, states, batch)
        params, kept = SGD.step(params, grads, kept)
        return params, states, kept

    # A copy, because the step donates its state.
    start = jax.tree.map(jax.numpy.copy, (made.params, made.states))
    held = [(*start, SGD.init(start[0]))]

    def call(batch: Batch) -> Any:
        held[0] = step(held[0], batch)
        return held[0]

    return call


def _over_stages(pipe: pipeline.Pipeline, made: FromModules) -> Step:
    held = [pipe.init(made.params, made.states)]

    def call(batch: Batch) -> Any:
        held[0], _ = pipe.train_step(held[0], batch)
        return held[0]

    return call


def _timed(
    plan: Plan,
    steps: Mapping[str, Step],
    batches: Sequence[Batch],
    wait: Callable[[], None],
) -> dict[str, list[float]]:
    """Seconds of each run; the arrangements take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        jax.block_until_ready(step(batches[0]))  # compiles
    for _ in range(plan.runs):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            for batch in batches:
                last = step(batch)
            jax.block_until_ready(last)
            seconds[name].append(time.perf_counter() - start)
    return seconds
