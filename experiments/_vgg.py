"""VGG: convolutions of 3 x 3 in five groups, and three large matrices.

Each group ends with a maximum over 2 x 2 and doubles the channels, up to eight times
those of the first. Most parameters are in the first matrix and most time goes into the
first groups, which is why a pipeline suits it. Images are `(examples, height, width,
3)`.

References:
  Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015, table 1, D.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax
from flax import nnx

KERNEL = nnx.initializers.he_normal()
CONVOLUTIONS = (2, 2, 3, 3, 3)
"""Convolutions of each group; with three matrices 16 layers that have parameters."""


@dataclass(frozen=True, slots=True)
class Network:
    """The sizes of a VGG-16.

    Attributes:
      width: Channels of the first group; the original has 64.
      image: Height and width of the images.
      classes: The number of classes.
    """

    width: int = 64
    image: int = 224
    classes: int = 1000

    def __str__(self) -> str:
        smaller = f" of width {self.width}, {self.image} pixels"
        return "VGG-16" + ("" if self == Network() else smaller)

    def layers(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """The layers in order, by name; their composition is the network."""
        found: dict[str, nnx.Module] = {}
        inputs = 3
        for group, count in enumerate(CONVOLUTIONS, 1):
            width = self.width * min(2 ** (group - 1), 8)
            for number in range(1, count + 1):
                name = f"conv{group}_{number}"
                found[name] = Convolution(inputs, width, number == count, rngs)
                inputs = width
        side, hidden = self.image // 2 ** len(CONVOLUTIONS), 64 * self.width
        sizes = (side * side * inputs, hidden, hidden, self.classes)
        for number, (before, after) in enumerate(pairwise(sizes), 6):
            activation = nnx.relu if after == hidden else None
            found[f"fc{number}"] = Dense(before, after, activation, rngs)
        return found


class Convolution(nnx.Module):
    """A 3 x 3 convolution and a ReLU; the last of a group also halves the image.

    Args:
      inputs: Input channels.
      outputs: Output channels.
      halves: Whether to take the maximum over 2 x 2.
    """

    def __init__(self, inputs: int, outputs: int, halves: bool, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(inputs, outputs, (3, 3), kernel_init=KERNEL, rngs=rngs)
        self.halves = halves

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(examples, height, width, inputs)` to `outputs` channels."""
        h = nnx.relu(self.conv(x))
        return nnx.max_pool(h, (2, 2), (2, 2)) if self.halves else h


class Dense(nnx.Module):
    """A dense layer over all features of an example.

    Args:
      inputs: Input features.
      outputs: Output features.
      activation: The activation; None for the last layer, which returns scores.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Callable[[jax.Array], jax.Array] | None,
        rngs: nnx.Rngs,
    ) -> None:
        self.linear = nnx.Linear(inputs, outputs, kernel_init=KERNEL, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(examples, ...)` to `(examples, outputs)`."""
        h = self.linear(x.reshape(len(x), -1))
        return h if self.activation is None else self.activation(h)
