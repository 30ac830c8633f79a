"""A language model whose embedding and decoder live on another worker than its LSTM.

torch: "Getting Started with Distributed RPC Framework", part 2 (rpc_tutorial,
distributed/rpc/rnn of its examples). Dropout is left out, and the data repeat, so that
the loss falls.

    python examples/recurrent_network.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import autograd, optim, rpc

WORKERS = ("trainer", "server")
TOKENS, EMBEDDING, HIDDEN, LAYERS = 7, 4, 5, 2
BATCH, LENGTH, EPOCHS, LR = 3, 6, 60, 2.0


def uniform(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Random weights in [-0.5, 0.5)."""
    return jnp.asarray(rng.uniform(-0.5, 0.5, shape))


class EmbeddingTable:
    """The first layer, on the server."""

    def __init__(self) -> None:
        """Makes its weights on the server."""
        self.table = autograd.variable(
            uniform(np.random.default_rng(1), TOKENS, EMBEDDING)
        )

    def forward(self, tokens: np.ndarray) -> Any:
        """Looks up a row for each token."""
        return autograd.apply(lambda table, tokens: table[tokens], self.table, tokens)

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """A reference to its one variable."""
        return [rpc.RRef(self.table)]


class Decoder:
    """The last layer, on the server."""

    def __init__(self) -> None:
        """Makes its weights on the server."""
        weight = uniform(np.random.default_rng(2), HIDDEN, TOKENS)
        self.linear = autograd.variable({"w": weight, "b": jnp.zeros(TOKENS)})

    def forward(self, hidden: Any) -> Any:
        """Returns the scores of the next token."""
        return autograd.apply(lambda p, h: h @ p["w"] + p["b"], self.linear, hidden)

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """A reference to its one variable, weight and bias."""
        return [rpc.RRef(self.linear)]


def lstm(layers: Any, x: jax.Array, hidden: Any) -> tuple[jax.Array, Any]:
    """Computes `torch.nn.LSTM`.

    Args:
      layers: The weights of each layer.
      x: The inputs, `(length, batch, features)`.
      hidden: The states (h, c) of each layer, `(batch, HIDDEN)` each.

    Returns:
      The outputs, `(length, batch, HIDDEN)`, and the last states.
    """
    last = []
    for p, start in zip(layers, hidden, strict=True):

        def step(carry: Any, x: jax.Array, p: Any = p) -> Any:
            h, c = carry
            gates = x @ p["input"] + h @ p["hidden"] + p["bias"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        end, x = jax.lax.scan(step, start, x)
        last.append(end)
    return x, last


class RNNModel:
    """Embedding and decoder on `server`, and the LSTM on this worker."""

    def __init__(self, server: str) -> None:
        """Creates the remote parts on the server and the LSTM's weights here."""
        self.embedding = rpc.remote(server, EmbeddingTable)
        rng = np.random.default_rng(3)
        self.lstm = autograd.variable(
            [
                {
                    "input": uniform(rng, inputs, 4 * HIDDEN),
                    "hidden": uniform(rng, HIDDEN, 4 * HIDDEN),
                    "bias": uniform(rng, 4 * HIDDEN),
                }
                for inputs in (EMBEDDING, HIDDEN)
            ]
        )
        self.decoder = rpc.remote(server, Decoder)

    def forward(self, tokens: np.ndarray, hidden: Any) -> tuple[Any, Any]:
        """Returns the scores and the hidden state for the next batch."""
        embedded = self.embedding.rpc_sync().forward(tokens)
        found, hidden = autograd.apply(lstm, self.lstm, embedded, hidden)
        return self.decoder.rpc_sync().forward(found), hidden

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """References to the variables of all parts, remote and local."""
        remote = [self.embedding, self.decoder]
        here = [rpc.RRef(self.lstm)]
        return here + [p for part in remote for p in part.rpc_sync().parameter_rrefs()]


def cross_entropy(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross-entropy over all positions of all sequences."""
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(scores), targets[..., None], axis=-1
    )
    return -chosen.mean()


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens, `(length, batch)`, and the tokens that follow them."""
    text = np.random.default_rng(4).integers(0, TOKENS, (2 * LENGTH + 1, BATCH))
    return [(text[i : i + LENGTH], text[i + 1 : i + 1 + LENGTH]) for i in (0, LENGTH)]


def train(server: str = "server", epochs: int = EPOCHS) -> list[float]:
    """Trains from the trainer; returns the losses of all batches."""
    model = RNNModel(server)
    opt = autograd.DistributedOptimizer(optim.sgd, model.parameter_rrefs(), lr=LR)
    hidden = [(jnp.zeros((BATCH, HIDDEN)), jnp.zeros((BATCH, HIDDEN)))] * LAYERS
    losses = []
    for _ in range(epochs):
        for tokens, targets in batches():
            with autograd.context() as context_id:
                scores, hidden = model.forward(tokens, hidden)
                loss = autograd.apply(cross_entropy, scores, targets)
                autograd.backward(context_id, [loss])
                opt.step(context_id)
            hidden = autograd.detach(hidden)  # keeps the values, drops their history
            losses.append(float(loss.value))
    return losses


def work(rank: int) -> list[float] | None:
    """Entry point of each process; the server only answers calls."""
    rpc.init_rpc(WORKERS[rank])
    losses = train() if rank == 0 else None
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    losses = rpc.spawn(work, nprocs=len(WORKERS))[0]
    for epoch in range(0, EPOCHS, 10):
        print("epoch", epoch, f"loss {losses[epoch * len(batches())]:.4f}")
