"""EasyDeL: `training_step` of its trainer on its own Llama, over dp, fsdp and tp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.strangers.layouts import llama
from experiments.strangers.layouts.llama import Layout, problem
from experiments.strangers.layouts.nnx_parameters import named, replaced

__all__ = ["AXES", "DEVICES", "MODEL", "PACKAGES", "claim", "problem", "trainer"]

PACKAGES = ("easydel", "flax", "optax")
DEVICES = 8

AXES = {
    "dp": (1, 2),
    "tp": (1, 2),
    "micro": (1, 3),
    "mask": ("none", "padded", "inside"),
    "tied": (False, True),
    "loss": ("blocks", "dense", "vocabulary", "tokens"),
    "smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.01),
}
RATE = 0.5
MODEL = ("mask", "tied", "smoothing", "z_loss")

LOSSES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "dense": {"chunk_block_size": None},
    "vocabulary": {"chunk_vocab_size": 4},
    "tokens": {"chunk_token_size": 4},
}
"""What is set of its `LossConfig`."""


def claim(layout: Layout) -> Any:
    """A step of gradient descent on the mean over tokens whose label is not -100."""

    def update(params: Any, gradient: Any, state: Any) -> Any:
        return jax.tree.map(lambda w, g: w - RATE * g, params, gradient), state

    own = {name: layout[name] for name in ("smoothing", "z_loss")}
    # Its rotary frequencies are in bfloat16, whatever the types of the model.
    turns = llama.rotations(10_000, jnp.bfloat16)
    return partial(llama.losses, turns=turns, **own), update


def trainer(layout: Layout) -> Callable[..., Any]:
    """One step of its trainer."""
    # It sets flags of jaxlib 0.9, at which a newer XLA aborts that is not yet running.
    jax.devices()
    import easydel
    from easydel.infra.loss_utils import LossConfig
    from easydel.trainers.trainer._fn import training_step

    sizes = (layout["dp"], -1, 1, layout["tp"], 1)
    config = easydel.LlamaConfig(
        vocab_size=llama.VOCABULARY,
        hidden_size=llama.WIDTH,
        intermediate_size=llama.HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=llama.HEADS,
        num_key_value_heads=llama.HEADS,
        max_position_embeddings=llama.LENGTH,
        rms_norm_eps=llama.EPSILON,
        tie_word_embeddings=layout["tied"],
        sharding_axis_dims=sizes,
        attn_mechanism="vanilla",
        attn_dtype=jnp.float32,
    )
    settings = LossConfig(
        label_smoothing=layout["smoothing"],
        z_loss=layout["z_loss"],
        **LOSSES[layout["loss"]],
    )

    def stepped(params: Any, state: Any, batch: Any) -> Any:
        types = {"dtype": jnp.float32, "param_dtype": jnp.float32}
        model = easydel.LlamaForCausalLM(
            config=config,
            precision=jax.lax.Precision.HIGHEST,
            rngs=nnx.Rngs(0),
            **types,
        )
        replaced(model, PATHS, params)
        with model.mesh:
            model = model.shard_model()
            own = easydel.EasyDeLState.create(
                model=model, tx=optax.sgd(RATE), init_opt_state=True, step=0
            )
            step = jax.jit(training_step, static_argnums=(2, 3, 4, 5, 6))
            options = settings, optax.constant_schedule(RATE), None, layout["micro"]
            own, _ = step(own, given(batch, layout), *options, None)
        return named(own.model, PATHS, params), state

    return stepped


def given(batch: Any, layout: Layout) -> dict[str, jax.Array]:
    """The step's arrays: labels are the tokens, or -100; of padding also the mask."""
    tokens, mask = (jnp.asarray(np.asarray(batch[k])) for k in ("tokens", "mask"))
    attended = mask if layout["mask"] == "padded" else jnp.ones_like(mask)
    labels = jnp.where(mask > 0, tokens, -100)
    return {"input_ids": tokens, "attention_mask": attended, "labels": labels}


LAYER = ("model", "layers", 0)
PATHS = {
    "embed": ("model", "embed_tokens", "embedding"),
    "head": ("lm_head", "kernel"),
    **{name: (*LAYER, "self_attn", f"{name}_proj", "kernel") for name in "qkvo"},
    **{
        name: (*LAYER, "mlp", f"{name}_proj", "kernel")
        for name in ("gate", "up", "down")
    },
    "before": (*LAYER, "input_layernorm", "kernel"),
    "after": (*LAYER, "post_attention_layernorm", "kernel"),
    "last": ("model", "norm", "kernel"),
}
"""Where the model has each parameter."""
