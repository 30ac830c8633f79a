"""Convolutional networks in stages, and the methods that train them, on digits.

Every method makes one update per batch and trains with the same batches in the same
order. GPipe, 1F1B and 2BW divide a batch into micro-batches.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments._asynchronous import compiled, rules
from experiments._digits import data
from jdist import optim, pipeline

PARTS, BATCH = 4, 32
STEPS = 1437 // BATCH  # of an epoch
CLASSES, SIDE = 10, 8


class Network(NamedTuple):
    """A convolutional network and its training.

    Attributes:
      key: The name in file names.
      name: The name in sentences.
      channels: Channels of the convolutions of each stage. A convolution with twice the
        channels of the one before halves height and width. The last stage ends in a
        readout.
      rate: The learning rate.
      epochs: The number of training epochs.
      seeds: The number of seeds.
    """

    key: str
    name: str
    channels: tuple[tuple[int, ...], ...]
    rate: float
    epochs: int
    seeds: int

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.channels)

    def made(self) -> Any:
        """The stages and the shapes of their parameters."""

        def modules(rngs: nnx.Rngs) -> list[nnx.Module]:
            inputs, side = 1, SIDE
            found: list[nnx.Module] = []
            for number, channels in enumerate(self.channels, 1):
                part = Part(inputs, channels, rngs)
                inputs, side = part.outputs, side // part.shrinks
                if number == self.stages:
                    part.readout = nnx.Linear(side**2 * inputs, CLASSES, rngs=rngs)
                found.append(part)
            return found

        shapes = nnx.eval_shape(lambda: nnx.List(modules(nnx.Rngs(0))))
        return pipeline.stages_from_nnx(list(shapes))

    def parameters(self, made: Any, seed: int) -> list[Any]:
        """Random parameters of each stage."""
        rng = np.random.default_rng((seed, 3))

        def drawn(leaf: Any) -> jax.Array:
            if len(leaf.shape) == 1:
                return jnp.zeros(leaf.shape, jnp.float32)
            scale = np.sqrt(2 / np.prod(leaf.shape[:-1]))
            return jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32)

        return [jax.tree.map(drawn, tree) for tree in made.params]


class Part(nnx.Module):
    """Convolutions of 3 x 3, each with a ReLU, and an optional readout."""

    def __init__(self, inputs: int, channels: Iterable[int], rngs: nnx.Rngs) -> None:
        """Makes a convolution for each number of output channels."""
        self.outputs, self.shrinks = inputs, 1
        self.convs: nnx.List[nnx.Conv] = nnx.List()
        self.readout: nnx.Linear | None = nnx.data(None)
        for outputs in channels:
            stride = 2 if outputs == 2 * self.outputs else 1
            conv = nnx.Conv(self.outputs, outputs, (3, 3), strides=stride, rngs=rngs)
            self.convs.append(conv)
            self.outputs, self.shrinks = outputs, self.shrinks * stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x`, `(examples, height, width, channels)`, to features or scores."""
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return x if self.readout is None else self.readout(x.reshape(len(x), -1))


def loss_of(scores: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """The cross-entropy of each example, `(examples,)`."""
    labels = batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def through(stages: Sequence[pipeline.Stage], params: Any, x: Any) -> Any:
    """Applies all stages in order."""
    for stage, own in zip(stages, params, strict=True):
        x = stage.fn(own, x)
    return x


# --- the methods ---


class State(NamedTuple):
    """Parameters and optimizer states of each stage."""

    params: list[Any]
    opt_states: list[Any]


class Losses(NamedTuple):
    """The loss of each micro-batch at the weights that it met, `(micro-batches,)`."""

    losses: jax.Array


class Unstashed:
    """PipeDream without weight stashing, as a control, on one device.

    A backward pass uses the newest weights of its stage with activations that older
    ones produced, which is not the gradient of any function. A pipeline never does so.

    Args:
      stages: Stages of one input and one output; the batch has the first input.
      loss_fn: As for `pipeline.Pipeline`.
      optimizer: The optimizer of every stage.
    """

    def __init__(
        self,
        stages: Sequence[pipeline.Stage],
        loss_fn: Callable[..., jax.Array],
        optimizer: optim.Optimizer,
    ) -> None:
        rule = rules.unstashed(optimizer)
        self._input, self._begin = stages[0].inputs[0], optimizer.init

        def epoch(length: int) -> Any:
            versions = pipeline.pipedream(len(stages), length).versions_used()
            return jax.jit(compiled.Program(stages, loss_fn, rule, versions))

        self._epoch = functools.cache(epoch)

    def init(self, params: Sequence[Any]) -> State:
        """The state before the first epoch."""
        return State(list(params), [self._begin(own) for own in params])

    def train_epoch(
        self, state: State, batches: Sequence[dict[str, Any]]
    ) -> tuple[State, Losses]:
        """Trains one pass over the batches; returns the new state and the losses."""
        # float64, so that a share of a mean is not rounded before the gradient is.
        weights = [np.ones(len(batch[self._input])) for batch in batches]
        data = compiled.stacked(batches, weights)
        epoch = self._epoch(len(batches))
        found = epoch(state.params, data, states=state.opt_states)
        return State(found.params, found.states), Losses(found.losses)


@dataclass(frozen=True)
class Flushing:
    """Updates all stages together, after all micro-batches of a batch."""

    schedule: Callable[[int], pipeline.Schedule]
    """Makes the schedule of a number of stages."""

    def parts(self, stages: int) -> int:
        """The number of micro-batches in a batch."""
        return self.schedule(stages).micro_batches

    def pipe(self, stages: Sequence[pipeline.Stage], rate: float, where: Any) -> Any:
        """A pipeline; `where` are its places, as in `Pipeline`."""
        schedule = self.schedule(len(stages))
        own = optim.sgd(lr=rate)
        return pipeline.Pipeline(stages, loss_of, schedule, where, optimizer=own)

    def epoch(self, pipe: Any, state: Any, batches: Sequence[Any]) -> Any:
        """Trains with the batches; returns the new state."""
        for batch in batches:
            state, _ = pipe.train_step(state, batch)
        return state

    def simulated(self, stages: int, costs: pipeline.Costs) -> float:
        """Seconds of an epoch for given costs of a micro-batch."""
        return STEPS * pipeline.simulate(self.schedule(stages), costs).makespan


@dataclass(frozen=True)
class Asynchronous:
    """Updates each stage on its own; the pipeline drains only after an epoch."""

    policy: Literal["stashing", "vertical_sync", "2bw"]
    cut: int = 1
    """The number of micro-batches in a batch."""
    stashed: bool = True
    """Whether a backward pass uses the weights of its forward pass."""

    def parts(self, stages: int) -> int:
        """Micro-batches in a batch; if it is cut, at least one for each stage."""
        return self.cut

    def pipe(self, stages: Sequence[pipeline.Stage], rate: float, where: Any) -> Any:
        """A pipeline; `where` are its places, as in `Pipeline`."""
        if not self.stashed:
            return Unstashed(stages, loss_of, optim.sgd(lr=rate))
        n, own = len(stages), optim.sgd(lr=rate)
        schedule = pipeline.pipedream(n, n, policy=self.policy, update_every=self.cut)
        return pipeline.Pipeline(stages, loss_of, schedule, where, optimizer=own)

    def epoch(self, pipe: Any, state: Any, batches: Sequence[Any]) -> Any:
        """Trains with the batches; returns the new state."""
        return pipe.train_epoch(state, cut(batches, self.cut))[0]

    def simulated(self, stages: int, costs: pipeline.Costs) -> float:
        """Seconds of an epoch for given costs of a micro-batch."""
        # The policies differ in weight versions, not in the order of actions.
        schedule = pipeline.pipedream(stages, STEPS * self.cut)
        return pipeline.simulate(schedule, costs).makespan


FLUSH, STASH, CONTROL = "1F1B", "PipeDream", "no stashing"
METHODS: dict[str, Flushing | Asynchronous] = {
    "model parallel": Flushing(lambda n: pipeline.gpipe(n, 1)),
    "GPipe": Flushing(lambda n: pipeline.gpipe(n, PARTS)),
    FLUSH: Flushing(lambda n: pipeline.one_f_one_b(n, PARTS)),
    STASH: Asynchronous("stashing"),
    CONTROL: Asynchronous("stashing", stashed=False),
    "vertical sync": Asynchronous("vertical_sync"),
    "2BW": Asynchronous("2bw", PARTS),
}


def batches_of(seed: int, epochs: int) -> tuple[list[list[dict[str, Any]]], Any]:
    """The batches of each epoch, and the test images and labels."""
    found = data(seed, epochs * STEPS, BATCH)
    named = [{"x": x, "labels": labels} for x, labels in found.batches]
    return [named[e * STEPS : (e + 1) * STEPS] for e in range(epochs)], found.test


def cut(batches: Sequence[dict[str, Any]], parts: int) -> list[dict[str, Any]]:
    """The micro-batches of all batches, in order."""
    return [
        {key: np.split(value, parts)[part] for key, value in batch.items()}
        for batch in batches
        for part in range(parts)
    ]


# --- training ---


class Curve(NamedTuple):
    """One training run.

    Attributes:
      accuracy: Accuracy on the test images, before the first epoch and after each.
      passes: The passes of the last epoch, for asynchronous methods.
    """

    accuracy: list[float]
    passes: Sequence[Any] = ()


class Trainer:
    """Trains a network by any method, with all stages on one device."""

    def __init__(self, network: Network) -> None:
        """Traces the network; compiles nothing yet."""
        self.network, self.made = network, network.made()
        stages = self.made.stages
        self._scores = jax.jit(lambda params, x: through(stages, params, x))

    def curve(self, name: str, seed: int) -> Curve:
        """Trains by one method with one seed; returns the curve."""
        method = METHODS[name]
        epochs, test = batches_of(seed, self.network.epochs)
        pipe = method.pipe(self.made.stages, self.network.rate, None)
        state = pipe.init(self.network.parameters(self.made, seed))
        found = [self._accuracy(state.params, *test)]
        for batches in epochs:
            state = method.epoch(pipe, state, batches)
            found.append(self._accuracy(state.params, *test))
        return Curve(found, getattr(pipe, "passes", ()))

    def _accuracy(self, params: Any, images: Any, labels: Any) -> float:
        """The share of correctly classified images."""
        return float((np.argmax(self._scores(params, images), 1) == labels).mean())
