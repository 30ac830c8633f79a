"""Reinforcement learning: observers play on their workers, one agent decides.

torch: "Getting Started with Distributed RPC Framework", part 1 (rpc_tutorial,
distributed/rpc/rl of its examples). The environment is a ball on a beam instead of
gym's CartPole, and dropout is left out. Each observer has its own random numbers, so
that a run is reproducible although observers ask concurrently. Returns are summed
within an observer's own episode, whereas torch's continue from one observer to the
next.

    python examples/reinforcement.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, rpc

WORKERS = ("agent", "observer1", "observer2")
EPISODES, STEPS, GAMMA = 40, 60, 0.99


class Environment:
    """A ball on a tipping beam; an action pushes it to the left (0) or right (1)."""

    def __init__(self, seed: int) -> None:
        """Seeds the random numbers; `reset` makes the first state."""
        self.rng = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        """Puts the ball near the middle; returns position and speed."""
        self.state = self.rng.uniform(-0.1, 0.1, 2)
        return self.state

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """Applies an action; returns state, reward and whether the ball fell off."""
        position, speed = self.state
        speed = speed + 0.1 * (2 * action - 1) + 0.05 * position
        self.state = np.array([position + 0.1 * speed, speed])
        return self.state, 1.0, bool(abs(self.state[0]) > 1)


def initial_policy() -> Any:
    """Random weights of a net with one hidden layer."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (2, 16), "w2": (16, 2)}
    return {name: jnp.asarray(rng.normal(size=s) / 4) for name, s in shapes.items()}


@jax.jit
def log_probabilities(policy: Any, states: jax.Array) -> jax.Array:
    """Log-probabilities of the two actions in each of the `states`, `(..., 2)`."""
    return jax.nn.log_softmax(jax.nn.relu(states @ policy["w1"]) @ policy["w2"])


class Observer:
    """Plays in its own environment; gets actions from the agent and reports rewards."""

    def __init__(self, number: int) -> None:
        """Makes the environment on the observer's worker."""
        self.number, self.environment = number, Environment(number)

    def run_episode(self, agent: rpc.RRef[Any], steps: int) -> None:
        """Plays one episode of at most `steps` steps."""
        state = self.environment.reset()
        for step in range(steps):
            action = agent.rpc_sync().select_action(self.number, step, state)
            state, reward, done = self.environment.step(action)
            agent.rpc_sync().report_reward(self.number, step, reward)
            if done:
                break


class Agent:
    """Holds the policy and the history of an episode for all observers."""

    def __init__(self, observers: int) -> None:
        """Makes the policy and its optimizer."""
        self.policy, self.optimizer = initial_policy(), optim.adam(lr=3e-2)
        self.optimizer_state = self.optimizer.init(self.policy)
        self.rngs = [np.random.default_rng((i, 1)) for i in range(observers)]
        # Fixed shapes, so that the update compiles once; entries after the end of an
        # episode stay zero. Each observer writes to its own row only.
        self.states = np.zeros((observers, STEPS, 2))
        self.actions = np.zeros((observers, STEPS), int)
        self.rewards = np.zeros((observers, STEPS))

    def select_action(self, observer: int, step: int, state: np.ndarray) -> int:
        """Draws an action; runs concurrently for several observers."""
        right = np.exp(log_probabilities(self.policy, state)[1])
        action = int(self.rngs[observer].random() < right)
        self.states[observer, step] = state
        self.actions[observer, step] = action
        return action

    def report_reward(self, observer: int, step: int, reward: float) -> None:
        """Stores the reward of a step; called by the observers."""
        self.rewards[observer, step] = reward

    def finish_episode(self) -> float:
        """Takes one optimizer step; returns the smallest reward of all observers."""
        played = self.rewards > 0
        returns = np.zeros_like(self.rewards)
        following = np.zeros(len(returns))
        for step in reversed(range(STEPS)):
            following = self.rewards[:, step] + GAMMA * following
            returns[:, step] = following
        mean, deviation = returns[played].mean(), returns[played].std()
        # The mask keeps steps after the end of an episode out of the gradient.
        advantages = played * (returns - mean) / (deviation + 1e-7)
        gradient = policy_gradient(self.policy, self.states, self.actions, advantages)
        self.policy, self.optimizer_state = self.optimizer.step(
            self.policy, gradient, self.optimizer_state
        )
        smallest = self.rewards.sum(axis=1).min()
        self.rewards[:] = 0
        return float(smallest)


@jax.jit
@jax.grad
def policy_gradient(
    policy: Any, states: jax.Array, actions: jax.Array, advantages: jax.Array
) -> jax.Array:
    """The gradient of REINFORCE's loss with respect to the policy."""
    found = log_probabilities(policy, states)
    chosen = jnp.take_along_axis(found, actions[..., None], axis=-1)[..., 0]
    return -(chosen * advantages).sum()


def train(observers: tuple[str, ...], episodes: int) -> list[float]:
    """Trains from the agent's worker; returns the smallest reward of each episode."""
    agent = Agent(len(observers))
    agent_rref = rpc.RRef(agent)  # observers call it by this reference
    rrefs = [rpc.remote(name, Observer, args=(i,)) for i, name in enumerate(observers)]
    rewards = []
    for _ in range(episodes):
        rpc.wait_all([o.rpc_async().run_episode(agent_rref, STEPS) for o in rrefs])
        rewards.append(agent.finish_episode())
    return rewards


def work(rank: int) -> list[float] | None:
    """Entry point of each process; the observers only answer calls."""
    rpc.init_rpc(WORKERS[rank])
    rewards = train(WORKERS[1:], EPISODES) if rank == 0 else None
    rpc.shutdown()
    return rewards


if __name__ == "__main__":
    rewards = rpc.spawn(work, nprocs=len(WORKERS))[0]
    for first in range(0, EPISODES, 5):
        print("episode", first, "reward", np.mean(rewards[first : first + 5]))
