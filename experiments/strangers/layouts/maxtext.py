"""MaxText: the `train_step` of its pre-training on its own Llama, over its mesh."""

from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules

from experiments.strangers.layouts import llama
from experiments.strangers.layouts.llama import Layout, problem
from experiments.strangers.layouts.nnx_parameters import named, replaced

__all__ = ["AXES", "DEVICES", "MODEL", "PACKAGES", "claim", "problem", "trainer"]

PACKAGES = ("maxtext", "flax", "optax")
DEVICES = 4
"""All are in the mesh: the axis "data" has those that the others leave."""

AXES = {
    "fsdp": (1, 2, 4),
    "tp": (1, 2),
    "context": (1, 2),
    "zero": (False, True),
    "micro": (1, 3),
    "mask": ("none", "padded", "inside"),
    "tied": (False, True),
    "tiles": (1, 4),
    "scan": (False, True),
    "remat": ("minimal", "full"),
    "shard_mode": ("auto", "explicit"),
    "z_loss": (0.0, 0.01),
    "clip": (False, True),
}
MODEL = ("mask", "tied", "z_loss", "clip")
LIMIT, RATE = 0.25, 0.5
# ZeRO needs Adam: its first step is gradient descent if epsilon is far larger.
EPSILON = 1e4


def valid(layout: Layout) -> bool:
    """Whether there are as many devices; it refuses ZeRO together with FSDP."""
    taken = layout["fsdp"] * layout["tp"] * layout["context"]
    return taken <= DEVICES and not (layout["zero"] and layout["fsdp"] > 1)


def claim(layout: Layout) -> Any:
    """A step on the mean over the counted tokens; its queries are not scaled."""

    def update(params: Any, gradient: Any, state: Any) -> Any:
        if layout["clip"]:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
            gradient = jax.tree.map(
                lambda g: g / jnp.maximum(1, norm / LIMIT), gradient
            )
        moved = jax.tree.map(
            lambda w, g: w - RATE * g / (1 + jnp.abs(g) / EPSILON), params, gradient
        )
        return moved, state

    turns = llama.rotations(10_000)
    own = partial(llama.losses, turns=turns, z_loss=layout["z_loss"], scale=1.0)
    return own, update


def trainer(layout: Layout) -> Callable[..., Any]:
    """One step of its loop."""
    from maxtext.trainers.pre_train.train import train_step
    from maxtext.utils import max_utils, maxtext_utils, sharding, train_utils

    config = configured(layout)
    *_, state = setup = train_utils.setup_train_loop(config, None)
    shardings, mesh = setup[2], setup[4]
    graph, start = nnx.split(state)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(
        config, shardings
    )
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, start, shardings, train_step, params_shardings=of_params
    )
    of_batch = sharding.get_input_data_sharding(config, mesh)
    layer = ("layers",) if layout["scan"] else ("layers_0",)
    paths = paths_of("decoder", *layer)

    def stepped(params: Any, state: Any, batch: Any) -> Any:
        # Its step takes the memory of what it is given.
        own = nnx.merge(graph, jax.tree.map(jnp.copy, start))
        replaced(own.model, paths, params)
        given = jax.device_put(inputs(batch, layout), of_batch)
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            size = max_utils.reordered_cp_size(config, mesh)
            if size > 1:
                order = maxtext_utils.get_reorder_callable(
                    size, config.shard_mode, hardware=config.hardware
                )
                given = order(given)
            placed = nnx.state(own)
            if config.shard_optimizer_over_data:
                placed = jax.device_put(placed, shardings)
            found, _ = step(placed, given)
        return named(nnx.merge(graph, found).model, paths, params), state

    return stepped


FIXED = {
    "base_emb_dim": llama.WIDTH,
    "base_mlp_dim": llama.HIDDEN,
    "base_num_query_heads": llama.HEADS,
    "base_num_kv_heads": llama.HEADS,
    "head_dim": llama.SIZE,
    "base_num_decoder_layers": 1,
    "vocab_size": llama.VOCABULARY,
    "max_target_length": llama.LENGTH,
    "normalization_layer_epsilon": llama.EPSILON,
    "normalize_embedding_logits": False,
    "attention": "dot_product",
    "dtype": "float32",
    "matmul_precision": "highest",
    "enable_dropout": False,
    "learning_rate": RATE * EPSILON,
    "learning_rate_final_fraction": 1.0,
    "warmup_steps_fraction": 0.0,
    "adam_b1": 0.0,
    "adam_eps": EPSILON,
    "adam_weight_decay": 0.0,
    "steps": 10,
    "ici_data_parallelism": -1,
    # The model is too small for its shards to be worth it.
    "sharding_tolerance": 1.0,
    "run_name": "layouts",
    "base_output_directory": "results/maxtext",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "packing": False,
    "log_config": False,
    "jax_cache_dir": "",
}
"""Its settings in all layouts."""


def configured(layout: Layout) -> Any:
    """Its configuration.

    Raises:
      ValueError: It refuses the layout.
    """
    from maxtext.configs import pyconfig

    # As its own start does.
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", True)
    base = resources.files("maxtext") / "configs" / "base.yml"
    own = {
        "ici_fsdp_parallelism": layout["fsdp"],
        "ici_tensor_parallelism": layout["tp"],
        "ici_context_parallelism": layout["context"],
        "shard_optimizer_over_data": layout["zero"],
        "per_device_batch_size": llama.ROWS / DEVICES / layout["micro"],
        "gradient_accumulation_steps": layout["micro"],
        "logits_via_embedding": layout["tied"],
        "num_vocab_tiling": layout["tiles"],
        "scan_layers": layout["scan"],
        "remat_policy": layout["remat"],
        "shard_mode": layout["shard_mode"],
        "z_loss_multiplier": layout["z_loss"],
        "gradient_clipping_threshold": LIMIT if layout["clip"] else 0.0,
    }
    try:
        return pyconfig.initialize([__file__, str(base)], **FIXED, **own)
    except SystemExit as error:
        raise ValueError("its configuration refuses the layout") from error


def inputs(batch: Any, layout: Layout) -> dict[str, Any]:
    """The step's arrays: targets are the next tokens, and segment 0 does not count."""
    tokens, mask = (np.asarray(batch[name]) for name in ("tokens", "mask"))
    ahead = {"targets": tokens, "targets_segmentation": mask}
    ahead = {name: np.roll(x, -1, 1) for name, x in ahead.items()}
    ahead["targets_segmentation"][:, -1] = 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), mask.shape)
    given = {
        "inputs": tokens,
        "inputs_segmentation": mask if layout["mask"] == "padded" else mask * 0 + 1,
        "inputs_position": positions,
        "targets_position": positions,
        **ahead,
    }
    return {name: jnp.asarray(x) for name, x in given.items()}


def paths_of(*decoder: str) -> dict[str, tuple[Any, ...]]:
    """Where the model has each parameter; its layer is at this path."""
    projections = {"q": "query", "k": "key", "v": "value", "o": "out"}
    mlp = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    return {
        "embed": ("token_embedder", "embedding"),
        "head": ("decoder", "logits_dense", "kernel"),
        **{
            name: (*decoder, "self_attention", own, "kernel")
            for name, own in projections.items()
        },
        **{name: (*decoder, "mlp", own, "kernel") for name, own in mlp.items()},
        "before": (*decoder, "pre_self_attention_layer_norm", "scale"),
        "after": (*decoder, "post_self_attention_layer_norm", "scale"),
        "last": ("decoder", "decoder_norm", "scale"),
    }
