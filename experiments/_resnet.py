"""Residual networks of bottleneck blocks, cut in two after their second group.

Four groups of blocks; each group but the first halves the image and doubles the
channels. The front is the stem and two groups, the back the other two, the mean over
the image and the classifier. Images are `(examples, height, width, 3)`.

References:
  He et al., Deep Residual Learning for Image Recognition, CVPR 2016. As in most code
  since, it is a block's 3x3 convolution that halves the image, not its first.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jdist import pipeline
from jdist.pipeline import FromModules

GROWTH = 4
"""The ratio of a block's output channels to those of its middle convolution."""


@dataclass(frozen=True, slots=True)
class Network:
    """The sizes of a residual network.

    Attributes:
      blocks: The number of blocks in each group; the original has four groups.
      width: Channels of the stem; the original has 64.
      classes: The number of classes.
    """

    blocks: tuple[int, ...]
    width: int = 64
    classes: int = 1000

    def __str__(self) -> str:
        layers = 3 * sum(self.blocks) + 2
        width = "" if self.width == 64 else f" of width {self.width}"
        return f"ResNet-{layers}{width}"

    def halves(self, rngs: nnx.Rngs) -> tuple[nnx.Module, nnx.Module]:
        """The front and the back, whose composition is the network."""
        widths = [self.width * 2**group for group in range(len(self.blocks))]
        groups = [
            group_of(widths[max(0, n - 1)], width, self.blocks[n], n, rngs)
            for n, width in enumerate(widths)
        ]
        return (
            Front(self.width, groups[:2], rngs),
            Back(widths[-1], self.classes, groups[2:], rngs),
        )

    def shapes(self) -> FromModules:
        """The two stages, with shapes in place of parameters and statistics."""
        halves = nnx.eval_shape(lambda: nnx.List(self.halves(nnx.Rngs(0))))
        return pipeline.stages_from_nnx(list(halves))

    def stages(self, seed: int) -> FromModules:
        """The two stages, with random parameters and initial statistics."""
        # Drawn by NumPy: compiling the modules' own initializers takes longer than
        # anything else here. These are also the same bits in every process.
        made, rng = self.shapes(), np.random.default_rng(seed)
        for trees in (made.params, made.states):
            trees[:] = [
                jax.tree.map_with_path(lambda path, x: _initial(path, x, rng), tree)
                for tree in trees
            ]
        return made


RESNET50 = Network((3, 4, 6, 3))


def _initial(path: Any, like: Any, rng: np.random.Generator) -> jax.Array:
    """He's normal numbers by a kernel's outputs; scales, variances 1; all else 0."""
    if len(like.shape) > 1:
        *window, inputs, outputs = like.shape
        # Keeps the size of the classifier's inputs.
        variance = 2 / (np.prod(window) * outputs) if window else 1 / inputs
        drawn = rng.normal(size=like.shape) * np.sqrt(variance)
    else:
        name = jax.tree_util.keystr(path)
        drawn = np.full(like.shape, "scale" in name or "var" in name)
    return jax.numpy.asarray(drawn, like.dtype)


class Normalised(nnx.Module):
    """A convolution without bias, and batch normalisation.

    Args:
      inputs: Input channels.
      outputs: Output channels.
      size: Height and width of the kernel, odd.
      stride: 2 halves height and width.
    """

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            stride,
            padding=size // 2,
            use_bias=False,
            rngs=rngs,
        )
        # The fast variance, a difference of two means of squares, would cancel in
        # float32.
        self.norm = nnx.BatchNorm(
            outputs, momentum=0.9, use_fast_variance=False, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises over all given examples together."""
        return self.norm(self.conv(x))


class Bottleneck(nnx.Module):
    """Three convolutions with a narrow middle one, and a shortcut.

    Args:
      inputs: Input channels.
      width: Channels of the middle convolution; the output has four times as many.
      stride: 2 halves height and width.
    """

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs) -> None:
        outputs = GROWTH * width
        self.reduce = Normalised(inputs, width, 1, 1, rngs)
        self.middle = Normalised(width, width, 3, stride, rngs)
        self.expand = Normalised(width, outputs, 1, 1, rngs)
        changes = inputs != outputs or stride != 1
        self.past = Normalised(inputs, outputs, 1, stride, rngs) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(examples, height, width, inputs)` to `4 * width` channels."""
        h = nnx.relu(self.middle(nnx.relu(self.reduce(x))))
        return nnx.relu(self.expand(h) + (x if self.past is None else self.past(x)))


def group_of(
    before: int, width: int, blocks: int, number: int, rngs: nnx.Rngs
) -> nnx.Sequential:
    """Blocks of one width; the first follows those of width `before`, or the stem."""
    inputs = GROWTH * before if number else before
    first = Bottleneck(inputs, width, 2 if number else 1, rngs)
    outputs = GROWTH * width
    others = [Bottleneck(outputs, width, 1, rngs) for _ in range(blocks - 1)]
    return nnx.Sequential(first, *others)


class Front(nnx.Module):
    """The stem and the first groups: from images to the activations at the cut."""

    def __init__(
        self, width: int, groups: list[nnx.Sequential], rngs: nnx.Rngs
    ) -> None:
        self.stem = Normalised(3, width, 7, 2, rngs)
        self.groups = nnx.Sequential(*groups)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to features of an eighth of the height and width."""
        h = nnx.relu(self.stem(x))
        h = nnx.max_pool(h, (3, 3), (2, 2), ((1, 1), (1, 1)))
        return self.groups(h)


class Back(nnx.Module):
    """The last groups, the mean over the image, and the classifier."""

    def __init__(
        self, width: int, classes: int, groups: list[nnx.Sequential], rngs: nnx.Rngs
    ) -> None:
        self.groups = nnx.Sequential(*groups)
        self.classifier = nnx.Linear(GROWTH * width, classes, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Maps features to scores, `(examples, classes)`."""
        return self.classifier(self.groups(h).mean((1, 2)))
