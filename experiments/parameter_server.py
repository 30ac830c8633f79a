"""Does a parameter server that updates in batches average what each trainer sent, and
do all go on with the same parameters?

Each trainer sends the gradient of its own share of the batch. The server's method is an
`async_execution`: it returns a future. When the last trainer's gradient has arrived,
the mean is applied by SGD with momentum, and the new parameters complete the future.
The data are scikit-learn's digits.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import data
from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, rpc, verify

TRAINERS = 3
BATCH = 96
ROUNDS, QUICK_ROUNDS = 200, 30
RATE, MOMENTUM = 0.1, 0.9


class Round(NamedTuple):
    """Digests of one side's values in a round, so that no arrays are kept."""

    sent: tuple[str, ...]
    """Digests of gradients: on the server one per trainer, on a trainer its own."""

    applied: str
    """The digest of the mean."""

    params: str
    """The digest of the parameters after the step."""


class Trained(NamedTuple):
    """The results of a run.

    Attributes:
      server: The rounds of the server.
      trainers: The rounds of each trainer.
      losses: The mean loss over all trainers, by round.
      accuracy: Accuracy on test images, before and after.
      alone: Digest of the parameters after the same rounds on one device.
      error_over_bound: The largest error of the mean against the gradient of the whole
        batch, relative to the bound.
    """

    server: list[Round]
    trainers: list[list[Round]]
    losses: list[float]
    accuracy: tuple[float, float]
    alone: str
    error_over_bound: float


def run(settings: Settings, progress: Progress) -> Result:
    """Runs a server and three trainers, each in a process."""
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    found: Trained = rpc.spawn(
        work, (rounds, settings.seed), nprocs=1 + TRAINERS, timeout=900
    )[0]
    return Result(
        claims=list(claims(found, rounds)),
        pictures=[
            Picture("loss", "Mean loss of the batch at each round.", plot(found.losses))
        ],
        tables={"Accuracy on examples not trained with": rows(found)},
        data={
            "losses": found.losses,
            "accuracy": list(found.accuracy),
            "error_over_bound": found.error_over_bound,
        },
    )


# --- the net ---


def initial(seed: int) -> Any:
    """Random weights of a net with one hidden layer."""
    rng = np.random.default_rng((seed, 1))

    def layer(inputs: int, outputs: int) -> Any:
        weights = rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        return {"w": jnp.asarray(weights, jnp.float32), "b": jnp.zeros(outputs)}

    return {"hidden": layer(64, 48), "readout": layer(48, 10)}


def scores(params: Any, images: jax.Array) -> jax.Array:
    """Scores of the ten digits, `(examples, 10)`, for images `(examples, 8, 8, 1)`."""
    hidden, readout = params["hidden"], params["readout"]
    flat = images.reshape(len(images), -1)
    return jnp.tanh(flat @ hidden["w"] + hidden["b"]) @ readout["w"] + readout["b"]


def losses_of(params: Any, share: Any) -> jax.Array:
    """The cross-entropy of each example, `(examples,)`."""
    images, labels = share
    given = scores(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(given, labels)


def accuracy_of(params: Any, examples: Any) -> float:
    """The share of correctly classified examples."""
    images, labels = examples
    return float(np.mean(np.argmax(scores(params, images), axis=1) == labels))


# --- the server ---


class Server:
    """Holds the parameters; takes a step when all trainers have sent a gradient."""

    def __init__(self, params: Any, trainers: int) -> None:
        """Starts with these parameters."""
        self._opt = optim.sgd(lr=RATE, momentum=MOMENTUM)
        self._step = jax.jit(self._opt.step)
        self._params, self._state = params, self._opt.init(params)
        self._trainers = trainers
        self._lock = threading.Lock()
        self._given: dict[int, Any] = {}
        self._answer: rpc.Future[Any] = rpc.Future()
        self.rounds: list[Round] = []

    def fetch(self) -> Any:
        """The current parameters."""
        return self._params

    @rpc.async_execution
    def update_and_fetch(self, trainer: int, gradient: Any) -> rpc.Future[Any]:
        """Adds a gradient; returns a future of the mean and of the new parameters.

        No thread waits: the call of the last trainer completes the future of all.
        """
        with self._lock:
            self._given[trainer] = gradient
            answer = self._answer
            if len(self._given) < self._trainers:
                return answer
            given = [self._given[i] for i in sorted(self._given)]
            self._given, self._answer = {}, rpc.Future()
            mean = average(given)
            self._params, self._state = self._step(self._params, mean, self._state)
            self.rounds.append(
                Round(tuple(map(digest, given)), digest(mean), digest(self._params))
            )
            told = mean, self._params
        # Outside of the lock: callbacks of the future run in this thread.
        answer.set_result(told)
        return answer


def average(gradients: Sequence[Any]) -> Any:
    """The mean, summed in the order of the trainers."""
    return jax.tree.map(lambda *g: sum(g[1:], g[0]) / len(g), *gradients)


# --- the trainers ---


def shares(batch: Any) -> list[Any]:
    """Equal parts of a batch, one for each trainer."""
    images, labels = (np.split(array, TRAINERS) for array in batch)
    return list(zip(images, labels, strict=True))


@jax.jit
@jax.value_and_grad
def value_and_grad(params: Any, share: Any) -> jax.Array:
    """The mean loss over a share, and its gradient."""
    return losses_of(params, share).mean()


def train(
    server: rpc.RRef[Any], trainer: int, rounds: int, seed: int
) -> tuple[list[Round], list[float]]:
    """Trains on one trainer; returns its rounds and losses."""
    params = server.rpc_sync().fetch()
    found, losses = [], []
    for batch in data(seed, rounds, BATCH).batches:
        loss, gradient = value_and_grad(params, shares(batch)[trainer])
        mean, params = server.rpc_sync().update_and_fetch(trainer, gradient)
        found.append(Round((digest(gradient),), digest(mean), digest(params)))
        losses.append(float(loss))
    return found, losses


def work(rank: int, rounds: int, seed: int) -> Trained | None:
    """Entry point of each process; rank 0 is the server and starts the trainers."""
    rpc.init_rpc(f"worker{rank}", allow=("experiments",))
    found = None
    if rank == 0:
        server = Server(initial(seed), TRAINERS)
        rref = rpc.RRef(server)
        running = [
            rpc.rpc_async(
                f"worker{i + 1}", train, args=(rref, i, rounds, seed), timeout=0
            )
            for i in range(TRAINERS)
        ]
        told = rpc.wait_all(running)
        losses = np.mean([losses for _, losses in told], axis=0).tolist()
        digits = data(seed, rounds, BATCH)
        before, after = initial(seed), server.fetch()
        accuracy = accuracy_of(before, digits.test), accuracy_of(after, digits.test)
        alone, worst = one_device(before, digits.batches)
        found = Trained(
            server.rounds, [each for each, _ in told], losses, accuracy, alone, worst
        )
    rpc.shutdown()
    return found


# --- the same elsewhere ---


def one_device(params: Any, batches: Sequence[Any]) -> tuple[str, float]:
    """The same rounds without rpc; also judges the mean against the whole gradient."""
    opt = optim.sgd(lr=RATE, momentum=MOMENTUM)
    state, step = opt.init(params), jax.jit(opt.step)

    def by_trainers(params: Any, batch: Any) -> Any:
        return average([value_and_grad(params, share) for share in shares(batch)])

    candidates = {"mean of trainers": by_trainers}
    report = verify.gradients(losses_of, params, batches[0], candidates)
    for batch in batches:
        _, mean = by_trainers(params, batch)
        params, state = step(params, mean, state)
    return digest(params), report.raise_if_failed().worst


def digest(tree: Any) -> str:
    """A SHA-256 digest of all bits of a tree."""
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()


# --- what came out ---


def claims(found: Trained, rounds: int) -> Iterator[Claim]:
    """Claims on every round, and on the end."""
    counted = [len(found.server), *map(len, found.trainers)]
    text = "the server steps once for each round of all trainers"
    yield Claim(text, counted == [rounds] * (1 + TRAINERS), str(counted))
    for what, count in agreeing(found).items():
        yield Claim(what, count == rounds, f"{count} of {rounds} rounds")
    final = found.server[-1].params
    text = "after the last round the parameters are one device's, bit for bit"
    yield Claim(text, final == found.alone, final[:12], leads=True)
    text = "the mean is the gradient of the whole batch, within the derived bound"
    ratio = found.error_over_bound
    yield Claim(text, ratio <= 1, f"error/bound {ratio:.2f}")
    first, last = (float(np.mean(x)) for x in (found.losses[:3], found.losses[-3:]))
    yield Claim("the loss falls", last < 0.7 * first, f"{first:.2f} to {last:.2f}")
    before, after = found.accuracy
    yield Claim("accuracy rises", after > before + 0.3, f"{before:.0%} to {after:.0%}")


def agreeing(found: Trained) -> Mapping[str, int]:
    """The number of rounds in which all values have the same bits, by claim."""
    rounds = list(zip(found.server, *found.trainers, strict=True))
    return {
        "each trainer's gradient is what the server received, bit for bit": sum(
            server.sent == tuple(trainer.sent[0] for trainer in trainers)
            for server, *trainers in rounds
        ),
        "trainers are told the gradient that the server applied, bit for bit": sum(
            all(trainer.applied == server.applied for trainer in trainers)
            for server, *trainers in rounds
        ),
        "all go on with the same parameters, bit for bit": sum(
            all(trainer.params == server.params for trainer in trainers)
            for server, *trainers in rounds
        ),
        "no two trainers send the same gradient": sum(
            len(set(server.sent)) == TRAINERS for server, *_ in rounds
        ),
    }


def rows(found: Trained) -> list[list[str]]:
    """A table of the accuracy before and after."""
    before, after = found.accuracy
    return [["", "accuracy"], ["before", f"{before:.1%}"], ["after", f"{after:.1%}"]]


def plot(losses: Sequence[float]) -> Figure:
    """The loss on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.semilogy(losses)
    axes.set_xlabel("round")
    axes.set_ylabel("mean loss")
    return figure
