"""Tunix: `PeftTrainer` and its own Llama 3, over the mesh axes fsdp and tp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer

from experiments.strangers.layouts import llama
from experiments.strangers.layouts.llama import HEADS, SIZE, Layout, problem
from experiments.strangers.layouts.nnx_parameters import named, replaced

__all__ = ["AXES", "DEVICES", "MODEL", "PACKAGES", "claim", "problem", "trainer"]

PACKAGES = ("google-tunix", "flax", "optax")
DEVICES = 8
THETA = 1_000_000

AXES = {
    "fsdp": (1, 2),
    "tp": (1, 2),
    "micro": (1, 3),
    "mask": ("none", "padded", "inside"),
    "tied": (False, True),
    "theta": (THETA, 500_000),
    "remat": ("NONE", "DECODER"),
    "clip": (False, True),
}
MODEL = ("mask", "tied", "theta", "clip")
LIMIT, RATE = 0.25, 0.5


def claim(layout: Layout) -> Any:
    """A step of gradient descent on the mean over the step's counted tokens."""

    def update(params: Any, gradient: Any, state: Any) -> Any:
        if layout["clip"]:
            clip = optax.clip_by_global_norm(LIMIT)
            gradient, _ = clip.update(gradient, optax.EmptyState())
        return jax.tree.map(lambda w, g: w - RATE * g, params, gradient), state

    turns = llama.rotations(layout["theta"])
    return partial(llama.losses, turns=turns), update


def trainer(layout: Layout) -> Callable[..., Any]:
    """One step of `train`."""
    count = layout["fsdp"] * layout["tp"]
    devices = np.array(jax.devices()[:count]).reshape(layout["fsdp"], layout["tp"])
    mesh = Mesh(devices, ("fsdp", "tp"))
    optimizer = optax.sgd(RATE)
    if layout["clip"]:
        optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), optimizer)

    def step(params: Any, state: Any, batch: Any) -> Any:
        with mesh:
            model = placed(layout, params, mesh)
            config = peft_trainer.TrainingConfig(
                eval_every_n_steps=10**6, gradient_accumulation_steps=layout["micro"]
            )
            own = peft_trainer.PeftTrainer(model, optimizer, config)
            own.with_gen_model_input_fn(model_input)
            own.train(parts(batch, layout["micro"]))
        return named(model, PATHS, params), state

    return step


def placed(layout: Layout, params: Any, mesh: Mesh) -> llama3.Llama3:
    """The model with these parameters, in its own shardings."""
    config = llama3.ModelConfig(
        num_layers=1,
        vocab_size=llama.VOCABULARY,
        embed_dim=llama.WIDTH,
        hidden_dim=llama.HIDDEN,
        num_heads=HEADS,
        head_dim=SIZE,
        num_kv_heads=HEADS,
        rope_theta=layout["theta"],
        norm_eps=llama.EPSILON,
        weight_tying=layout["tied"],
        remat_config=llama3.RematConfig[layout["remat"]],
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    replaced(model, PATHS, params)
    # As its guide places a model: by the specifications that its parameters carry.
    state = nnx.state(model)
    specs = nnx.get_partition_spec(state)
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    nnx.update(model, jax.device_put(state, shardings))
    return model


LAYER = ("layers", 0)
PATHS = {
    "embed": ("embedder", "input_embedding"),
    "head": ("lm_head", "w"),
    **{name: (*LAYER, "attn", f"{name}_proj", "w") for name in "qkvo"},
    **{
        name: (*LAYER, "mlp", f"{name}_proj", "kernel")
        for name in ("gate", "up", "down")
    },
    "before": (*LAYER, "input_layernorm", "w"),
    "after": (*LAYER, "post_attention_layernorm", "w"),
    "last": ("final_norm", "w"),
}
"""Where the model has each parameter."""


def parts(batch: Any, micro: int) -> list[peft_trainer.TrainingInput]:
    """The step's micro-batches."""
    tokens, mask = (np.split(np.asarray(batch[k]), micro) for k in ("tokens", "mask"))
    given = zip(tokens, mask, strict=True)
    return [peft_trainer.TrainingInput(*each) for each in given]


def model_input(given: peft_trainer.TrainingInput) -> dict[str, Any]:
    """The arguments of the trainer's loss: every token sees those before it."""
    shape = given.input_tokens.shape
    seen = jnp.tril(jnp.ones((shape[1], shape[1]), bool))
    return {
        "input_tokens": given.input_tokens,
        "input_mask": given.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
        "attention_mask": jnp.broadcast_to(seen, (*shape, shape[1])),
    }
