"""A VGG-16 and a ResNet-50 as lists of layers, each of them timed where this runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import _resnet, _vgg
from experiments._result import Settings
from jdist import pipeline


class Sizes(NamedTuple):
    """The networks to profile and the repetitions.

    Attributes:
      vgg: The VGG network.
      resnet: The residual network.
      pixels: Height and width of the ResNet's images.
      examples: Examples in a micro-batch.
      repeats: Timed runs of each pass of a layer.
    """

    vgg: _vgg.Network
    resnet: _resnet.Network
    pixels: int
    examples: int
    repeats: int


def sizes_for(settings: Settings) -> Sizes:
    """The original sizes; small ones for the quick form on a CPU."""
    slow = jax.devices()[0].platform == "cpu"
    if settings.quick and slow:
        small = _vgg.Network(width=8, image=32, classes=10)
        return Sizes(small, _resnet.Network((1, 1, 1, 1), 8, 10), 32, 4, 3)
    examples = 8 if slow else 64
    return Sizes(_vgg.Network(), _resnet.RESNET50, 224, examples, 5 if slow else 20)


class Stem(nnx.Module):
    """A ResNet's first convolution and the max-pooling after it."""

    def __init__(self, first: nnx.Module) -> None:
        """Takes the convolution from the network."""
        self.first = first

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to features of a quarter of the height and width."""
        h = nnx.relu(self.first(x))
        return nnx.max_pool(h, (3, 3), (2, 2), ((1, 1), (1, 1)))


class Head(nnx.Module):
    """The mean over the image, and the classifier."""

    def __init__(self, classifier: nnx.Module) -> None:
        """Takes the classifier from the network."""
        self.classifier = classifier

    def __call__(self, h: jax.Array) -> jax.Array:
        """Maps features to scores, `(examples, classes)`."""
        return self.classifier(h.mean((1, 2)))


def vgg_layers(sizes: Sizes) -> dict[str, nnx.Module]:
    """The convolutions and matrices of the VGG, as shapes."""
    return nnx.eval_shape(lambda: sizes.vgg.layers(nnx.Rngs(0)))


def resnet_layers(sizes: Sizes) -> dict[str, nnx.Module]:
    """The blocks of the ResNet, as shapes."""
    halves: Any = nnx.eval_shape(lambda: sizes.resnet.halves(nnx.Rngs(0)))
    front, back = halves
    groups = [*front.groups.layers, *back.groups.layers]
    found: dict[str, nnx.Module] = {"stem": Stem(front.stem)}
    for number, group in enumerate(groups, 1):
        for place, block in enumerate(group.layers, 1):
            # Blocks are not divided: a cut inside one would have to send its shortcut
            # too.
            found[f"block{number}_{place}"] = block
    return found | {"head": Head(back.classifier)}


def profiled(
    layers: Mapping[str, nnx.Module], pixels: int, sizes: Sizes
) -> pipeline.Profile:
    """Times each layer on random images with random parameters."""
    rng = np.random.default_rng(0)

    def drawn(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype),
            tree,
        )

    modules = [
        replace(module, params=drawn(module.params), state=drawn(module.state))
        for module in pipeline.modules_from_nnx(layers)
    ]
    images = jax.ShapeDtypeStruct((sizes.examples, pixels, pixels, 3), jnp.float32)
    return pipeline.profile(modules, {"x": drawn(images)}, repeats=sizes.repeats)
