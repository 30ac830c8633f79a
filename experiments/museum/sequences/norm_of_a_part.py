"""The norm's gradient is one device's part of the sequence.

With sequence parallelism the norms see a part of each sequence, so the gradients of
their weights have to be summed over the devices of the tensor-parallel group. For the
last norm this was left out: its copies had different gradients and drifted apart.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer, mesh, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/1446"
CLAIM = "The gradient of the mean over the counted tokens, on every device."
EXPECTED = ("first difference: gradient, blocks/1/scale", "differ over tp")


def buggy(path: str) -> bool:
    """Whether the gradient of a leaf is summed over the sequence."""
    return path != "['blocks'][1]['scale']"


def fixed(path: str) -> bool:
    """Whether the gradient of a leaf is summed over the sequence."""
    return True


def trainer(part: Trainer) -> Trainer:
    """Two replicas; two devices share the sequences, and the blocks' hidden units."""

    def layer(p: Tree, h: Tree, name: str) -> Tree:
        z = lax.all_gather(model.rms(h, p["scale"]), "tp", axis=1, tiled=True)
        inner = jax.nn.gelu(z @ p["up"]) @ p["down"]
        inner = lax.psum_scatter(inner, "tp", scatter_dimension=1, tiled=True)
        return SHOW(h + inner, name)

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(batch["mask"].sum(), ("dp", "tp"))
        mean = lambda p: model.total(p, batch, layer) / tokens  # noqa: E731
        loss, gradient = jax.value_and_grad(mean)(params)

        def summed(path: Tree, g: Tree) -> Tree:
            g, place = lax.psum(g, "dp"), jax.tree_util.keystr(path)
            divided = path[-1].key in ("up", "down")
            return g if divided or not part(place) else lax.psum(g, "tp")

        gradient = jax.tree_util.tree_map_with_path(summed, gradient)
        return lax.psum(loss, ("dp", "tp")), gradient

    specs = model.specs()
    return spmd(local, mesh(dp=2, tp=2), (specs, P("dp", "tp")), (P(), specs))


# --- what the judge needs ---

SHOW = partial(verify.tap, tp=1)


judge = model.judge
