"""A small policy, its clipped loss, and answers in groups."""

from typing import Any

import jax
import jax.numpy as jnp

from jdist import verify

Tree = Any

PROMPTS, ANSWERS, LENGTH = 4, 3, 5


def policy_losses(p: Tree, batch: Tree, advantages: Tree) -> Tree:
    """The policy-gradient loss of each token, `(answers, tokens)`."""
    h = verify.tap(jnp.tanh(p["embed"][batch["x"]] @ p["inward"]), "hidden")
    scores = jax.nn.log_softmax(verify.tap(h @ p["outward"], "scores"))
    chosen = jnp.take_along_axis(scores, batch["y"][..., None], -1)[..., 0]
    ratio = verify.tap(jnp.exp(chosen - batch["old"]), "ratio")
    advantages = verify.tap(advantages, "advantage")[:, None]
    clipped = jnp.clip(ratio, 0.8, 1.2) * advantages
    return -jnp.minimum(ratio * advantages, clipped) * batch["mask"]


def advantages_of(rewards: Tree) -> Tree:
    """Each answer's advantage in its group: `(prompts, answers)` to the same."""
    centred = rewards - rewards.mean(1, keepdims=True)
    return centred / (rewards.std(1, keepdims=True) + 1e-4)


def answers() -> tuple[Tree, Tree]:
    """Random parameters, and three answers to each of four prompts."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    normal = lambda *s: jax.random.normal(next(keys), s)  # noqa: E731
    params = {"embed": normal(11, 5), "inward": normal(5, 7), "outward": normal(7, 11)}
    count = PROMPTS * ANSWERS
    ids = jax.random.randint(next(keys), (2, count, LENGTH), 0, 11)
    lengths = jnp.array([5, 2, 3, 4, 1, 5, 5, 2, 4, 3, 5, 2])
    mask = (jnp.arange(LENGTH) < lengths[:, None]).astype(jnp.float32)
    batch = {"x": ids[0], "y": ids[1], "mask": mask, "reward": normal(count)}
    return params, {**batch, "old": -2.4 + 0.3 * normal(count, LENGTH)}
