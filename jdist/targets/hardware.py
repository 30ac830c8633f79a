"""Hardware to compile for, by name: chips of one kind in hosts."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist._errors import check_choice, check_sequence, check_type, value_error
from jdist.targets import compilers
from jdist.targets.chips import CHIPS, Chip

FORM = "must be CHIP:SHAPE, such as 'v5e:4x4' (a slice) or 'h100:2x8' (hosts x GPUs)"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A slice or cluster of chips of one kind; `target` makes known ones by name.

    Example:
      >>> from jdist import targets
      >>> pod = targets.target("v5p:8x8x16")
      >>> pod.chips, pod.hosts
      (1024, 256)

    Attributes:
      chip: The kind of the chips, with its published figures.
      shape: Number of chips along each axis of a TPU slice; of hosts, and of GPUs of
        each; or of CPU devices.

    Raises:
      ValueError: The chip's platform does not take such a shape.
    """

    chip: Chip
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_type("Hardware(chip=...)", self.chip, Chip, "must be a Chip")
        rule = "must be a tuple of integers"
        check_sequence("Hardware(shape=...)", self.shape, int, rule)
        gpus = "They are hosts and the GPUs of each: h100:1x8 is one host."
        forms = {
            "tpu": ((2, 3), "They are chips along the axes of the slice."),
            "cuda": ((2,), gpus),
            "cpu": ((1,), "It is the number of CPU devices."),
        }
        platform = self.chip.platform
        check_choice("Chip(platform=...)", platform, forms)
        lengths, meaning = forms[platform]
        if len(self.shape) not in lengths or any(size < 1 for size in self.shape):
            counts = " or ".join(map(str, lengths))
            rule = f"must have {counts} positive numbers for {platform}"
            raise value_error("Hardware(shape=...)", rule, self.shape, meaning)

    @property
    def name(self) -> str:
        """Such as "v5e:4x4"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Number of chips, each one JAX device."""
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """Number of machines."""
        if self.chip.platform == "cuda":
            return self.shape[0]
        if self.chip.platform == "cpu":
            return 1
        return self.chips // math.prod(compilers.host_bounds(self.chip, self.shape))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices that programs can be compiled for, but not run on.

        Raises:
          Unavailable: The compiler is not installed, or of another version.
          ValueError: The compiler knows no such slice.
        """
        return _devices(self)

    def mesh(self, axes: Mapping[str, int]) -> Mesh:
        """A mesh over all chips.

        On a TPU slice the axes of the mesh follow those of the torus, as in
        `jax.make_mesh`.

        Args:
          axes: Number of chips along each named axis, such as
            `{"data": 4, "model": 4}`.

        Raises:
          ValueError: The sizes do not multiply to the number of chips.
          Unavailable: See `devices`.
        """
        if math.prod(axes.values()) != self.chips:
            rule = f"must multiply to the {self.chips} chips of {self.name}"
            raise value_error("mesh(axes=...)", rule, dict(axes))
        if self.chip.platform == "tpu":
            return jax.make_mesh(
                tuple(axes.values()),
                tuple(axes),
                devices=self.devices,
                # As for `jax.sharding.Mesh`, whose axes are automatic in every version.
                axis_types=(AxisType.Auto,) * len(axes),
            )
        devices = np.array(self.devices, dtype=object).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes))


@functools.lru_cache(maxsize=32)
def _devices(hardware: Hardware) -> tuple[jax.Device, ...]:
    # Cached: each call makes new devices, and those of two calls are not equal.
    return compilers.devices(hardware.chip, hardware.shape)


def target(name: str) -> Hardware:
    """Looks up hardware by name; needs neither the hardware nor its compiler.

    Args:
      name: A TPU slice, `"v5e:4x4"`, `"v5p:8x8x16"`, `"v6e:16x16"`; or hosts and the
        GPUs of each, `"h100:2x8"`, also a100 and b200.

    Raises:
      ValueError: There is no such chip, or the shape does not fit it. Another chip is
        described by `Chip` and `Hardware`.

    Example:
      >>> from jdist import targets
      >>> targets.target("h100:2x8").chips
      16
    """
    check_type("target(name)", name, str, FORM)
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    if match is None:
        raise value_error("target(name=...)", FORM, name)
    chip, shape = match.groups()
    if chip not in CHIPS:
        rule = f"must be of a known chip: {', '.join(CHIPS)}"
        remedy = "`targets.Hardware(targets.Chip(...), shape)` describes another."
        raise value_error("target(name=...)", rule, name, remedy)
    return Hardware(CHIPS[chip], tuple(map(int, shape.split("x"))))
