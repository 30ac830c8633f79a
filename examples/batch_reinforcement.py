"""Reinforcement learning whose agent decides for all observers in one batch.

torch: "Implementing Batch RPC Processing Using Asynchronous Executions", part 2
(rpc_async_execution, distributed/rpc/batch/reinforce.py of its examples). It differs
from torch's as examples/reinforcement.py does: a ball on a beam, no dropout,
reproducible random numbers. All observers play the same number of steps and reset in
between.

    python examples/batch_reinforcement.py
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, rpc

WORKERS = ("agent", "observer1", "observer2")
EPISODES, STEPS, GAMMA = 30, 60, 0.95


class Environment:
    """A ball on a tipping beam; an action pushes it to the left (0) or right (1)."""

    def __init__(self, seed: int) -> None:
        """Seeds the random numbers; `reset` makes the first state."""
        self.rng = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        """Puts the ball near the middle; returns position and speed."""
        self.state = self.rng.uniform(-0.1, 0.1, 2)
        return self.state

    def step(self, action: int) -> tuple[np.ndarray, bool]:
        """Applies an action; returns the state and whether the ball has fallen off."""
        position, speed = self.state
        speed = speed + 0.1 * (2 * action - 1) + 0.05 * position
        self.state = np.array([position + 0.1 * speed, speed])
        return self.state, bool(abs(self.state[0]) > 1)


def initial_policy() -> Any:
    """Random weights of a net with one hidden layer."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (2, 16), "w2": (16, 2)}
    return {name: jnp.asarray(rng.normal(size=s) / 4) for name, s in shapes.items()}


@jax.jit
def log_probabilities(policy: Any, states: jax.Array) -> jax.Array:
    """Log-probabilities of the two actions in each of the `states`, `(..., 2)`."""
    return jax.nn.log_softmax(jax.nn.relu(states @ policy["w1"]) @ policy["w2"])


@jax.jit
@jax.grad
def policy_gradient(
    policy: Any, states: jax.Array, actions: jax.Array, returns: jax.Array
) -> jax.Array:
    """The gradient of REINFORCE's loss with respect to the policy."""
    found = log_probabilities(policy, states)
    chosen = jnp.take_along_axis(found, actions[..., None], axis=-1)[..., 0]
    return -(chosen * returns).sum() / returns.size


class Observer:
    """Plays in its own environment with the actions that the agent chooses."""

    def __init__(self, number: int) -> None:
        """Makes the environment on the observer's worker."""
        self.number, self.environment = number, Environment(number)

    def run_episode(self, agent: rpc.RRef[Any]) -> tuple[np.ndarray, int]:
        """Discounted returns, `(STEPS,)`, and the length of the first play."""
        state, start, lengths = self.environment.reset(), 0, []
        returns = np.ones(STEPS)  # the reward of a step is 1
        for step in range(STEPS):
            action = agent.rpc_sync().select_action(self.number, state)
            state, done = self.environment.step(action)
            if done or step == STEPS - 1:
                for i in reversed(range(start, step)):
                    returns[i] += GAMMA * returns[i + 1]
                lengths.append(step + 1 - start)
                state, start = self.environment.reset(), step + 1
        return returns, lengths[0]


class Agent:
    """Holds the policy and the history of an episode for all observers."""

    def __init__(self, observers: int) -> None:
        """Makes the policy and its optimizer."""
        self.policy, self.optimizer = initial_policy(), optim.adam(lr=3e-2)
        self.optimizer_state = self.optimizer.init(self.policy)
        self.rng = np.random.default_rng(1)
        self.lock = threading.Lock()
        self.states, self.waiting = np.zeros((observers, 2)), observers
        self.all_actions: rpc.Future[np.ndarray] = rpc.Future()
        self.history: list[tuple[np.ndarray, np.ndarray]] = []

    # The call completes when the future does: no thread waits, however many observers
    # ask.
    @rpc.async_execution
    def select_action(self, observer: int, state: np.ndarray) -> rpc.Future[int]:
        """A future of the observer's action, which is drawn when all have asked."""
        with self.lock:
            self.states[observer] = state
            all_actions = self.all_actions
            action = all_actions.then(lambda actions: int(actions.wait()[observer]))
            self.waiting -= 1
            if self.waiting:
                return action
            right = np.exp(log_probabilities(self.policy, self.states)[:, 1])
            actions = (self.rng.random(len(right)) < right).astype(int)
            # A copy, because the observers overwrite their rows in the next step.
            self.history.append((self.states.copy(), actions))
            self.waiting, self.all_actions = len(actions), rpc.Future()
        all_actions.set_result(actions)
        return action

    def finish_episode(self, returns: np.ndarray) -> None:
        """Takes one step of the optimizer; `returns` is `(steps, observers)`."""
        states, actions = map(np.stack, zip(*self.history, strict=True))
        gradient = policy_gradient(self.policy, states, actions, returns)
        self.policy, self.optimizer_state = self.optimizer.step(
            self.policy, gradient, self.optimizer_state
        )
        self.history = []


def train(observers: tuple[str, ...], episodes: int) -> list[float]:
    """Trains from the agent's worker; returns the mean lengths of the first plays."""
    agent = Agent(len(observers))
    agent_rref = rpc.RRef(agent)  # observers call it by this reference
    rrefs = [rpc.remote(name, Observer, args=(i,)) for i, name in enumerate(observers)]
    lengths = []
    for _ in range(episodes):
        told = rpc.wait_all([o.rpc_async().run_episode(agent_rref) for o in rrefs])
        agent.finish_episode(np.stack([returns for returns, _ in told], axis=1))
        lengths.append(float(np.mean([length for _, length in told])))
    return lengths


def work(rank: int) -> list[float] | None:
    """Entry point of each process; the observers only answer calls."""
    rpc.init_rpc(WORKERS[rank])
    lengths = train(WORKERS[1:], EPISODES) if rank == 0 else None
    rpc.shutdown()
    return lengths


if __name__ == "__main__":
    lengths = rpc.spawn(work, nprocs=len(WORKERS))[0]
    for first in range(0, EPISODES, 5):
        print("episode", first, "length", np.mean(lengths[first : first + 5]))
