"""Compilation of a function, from shapes alone, for unattached hardware."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.stages import Compiled, Lowered

from jdist._compat import equations_in
from jdist._errors import check_type, type_error, value_error
from jdist._tree import PyTree, shapes_of, type_name
from jdist.targets import compilers, hlo, roofline
from jdist.targets.hardware import Hardware
from jdist.targets.report import CompiledProgram, DeviceMemory, size_text

CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class CanBeLowered(Protocol):
    """An object with a `lower` method, such as the result of `jax.jit`."""

    def lower(self, *arguments: PyTree) -> Lowered:
        """Lowers the program for arguments of these shapes."""
        ...


def compile(
    fn: Callable[..., PyTree] | CanBeLowered | Lowered,
    *shapes: PyTree,
    target: Hardware,
) -> CompiledProgram:
    """Compiles a function for unattached hardware, and reports on the program.

    A program that does not fit is not an error: the report says so in `fits` and
    `refused`.

    Args:
      fn: A function; a jitted function, whose `donate_argnums` apply; any object with a
        method `lower`; or a program already lowered for devices of the target, such as
        those of `Pipeline.lower`, without shapes.
      *shapes: Its arguments. Arrays and `jax.ShapeDtypeStruct`s give shapes; one with a
        sharding over `target.mesh(...)` is laid out by it, and all others are
        replicated over the same mesh. On a target of one chip none needs a sharding.
        Other values are passed through unchanged.
      target: The hardware, from `targets.target`.

    Raises:
      TypeError: `fn` can be neither called nor lowered; or shapes are given with what
        was lowered already.
      ValueError: No argument has a sharding, or one is of other devices than the
        target's; or the function calls back to the host and the compiler of GPUs, which
        has no host here, cannot lower it.
      Unavailable: The compiler is not installed, or of another version than JAX's.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import targets
      >>> here = targets.Chip("here", "cpu", 2**30, 1e10, {"float32": 1e11})
      >>> x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
      >>> found = targets.compile(
      ...     lambda x: x.T @ x, x, target=targets.Hardware(here, (1,))
      ... )
      >>> found.fits, found.flops, found.bytes_per_device.outputs
      (True, 131072, 4096)
    """
    rule = "must be a Hardware, such as targets.target('v5e:4x4')"
    check_type("compile(target=...)", target, Hardware, rule)
    if isinstance(fn, Lowered):
        if shapes:
            rule = "must be left out where the program was lowered already"
            raise type_error("compile(shapes=...)", rule, f"{len(shapes)} arguments")
        return _compiled(fn, target)
    devices = target.devices
    if not callable(fn) and not hasattr(fn, "lower"):
        rule = "must be a function or have a method `lower`"
        raise type_error("compile(fn=...)", rule, type_name(fn))
    default = _default_sharding(shapes, target, devices)
    placed = jax.tree.map(lambda leaf: _shape(leaf, default), shapes)
    # A jitted function is lowered as it is, to keep its options, such as donation.
    lowerable: CanBeLowered = fn if hasattr(fn, "lower") else jax.jit(fn)
    return _compiled(_lowered(lowerable, placed, target), target)


def _compiled(lowered: Lowered, target: Hardware) -> CompiledProgram:
    # Read before XLA optimizes: fusion would merge the places that are reported.
    before = lowered.as_text("hlo")
    found = CompiledProgram(
        target.name,
        target.chip.memory,
        None,
        float64=_places(before, r"\b(?:f64|c128)\["),
        host_callbacks=_places(before, r"_callback\"|is_host_transfer=true"),
    )
    try:
        compiled = lowered.compile(compilers.compiler_options(target.chip))
    except jax.errors.JaxRuntimeError as error:
        # Exceeding the memory is a result to report; any other error is raised.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(found, str(error))
    return _reported(found, compiled, target)


def _default_sharding(
    shapes: PyTree, target: Hardware, devices: tuple[jax.Device, ...]
) -> Sharding:
    """The sharding of arguments that have none: replicated over the same mesh."""
    mesh = None
    for leaf in jax.tree.leaves(shapes):
        sharding = getattr(leaf, "sharding", None)
        # A concrete array is on attached devices; only its shape applies.
        if not isinstance(leaf, jax.ShapeDtypeStruct) or sharding is None:
            continue
        if not sharding.device_set <= set(devices):
            rule = f"must be laid out over devices of {target.name}"
            remedy = "Its meshes are made by `target.mesh({...})`."
            raise value_error("compile(shapes=...)", rule, f"{sharding}", remedy)
        if mesh is None and isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    if target.chips == 1:
        return SingleDeviceSharding(devices[0])
    rule = f"must say for one argument how it is laid out over {target.name}"
    remedy = (
        "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding("
        "target.mesh({...}), jax.P(...)))."
    )
    raise value_error("compile(shapes=...)", rule, "no sharding", remedy)


def _shape(leaf: PyTree, default: Sharding) -> PyTree:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray):
        return shapes_of(leaf).update(sharding=default)
    return leaf


def _lowered(fn: CanBeLowered, placed: tuple[PyTree, ...], target: Hardware) -> Lowered:
    # An object that only has `lower` cannot be traced apart from lowering.
    if not hasattr(fn, "trace"):
        return fn.lower(*placed)
    # Traced separately, so that a failed lowering can name its callbacks.
    traced = fn.trace(*placed)
    try:
        return traced.lower()
    except RuntimeError as error:
        called = {each.primitive.name for each in equations_in(traced.jaxpr)}
        names = sorted(called & CALLBACKS)
        if not names:
            raise
        rule = f"must not call back to the host: {target.name} has none here"
        remedy = "Leave the callbacks out of what is compiled for absent hardware."
        raise value_error("compile(fn=...)", rule, ", ".join(names), remedy) from error


def _places(text: str, pattern: str) -> tuple[str, ...]:
    """Places of the traced function whose instructions match a pattern."""
    # A dict as an ordered set: many instructions share one place.
    found: dict[str, None] = {}
    for line in text.splitlines()[1:]:
        # An instruction has " = "; the head of a computation names its types only.
        if " = " in line and re.search(pattern, line):
            name = re.search(r'op_name="([^"]*)"', line)
            place = name[1] if name else line.strip().partition(" = ")[0]
            found[place.replace("\\'", "'")] = None
    return tuple(found)


def _refused(found: CompiledProgram, message: str) -> CompiledProgram:
    """Adds the compiler's out-of-memory message to a report."""
    text = message.partition("RESOURCE_EXHAUSTED: ")[2].partition("\n")[0] or message
    # XLA's compilers use two wordings.
    patterns = (
        r"\((\d+(?:\.\d+)?)([KMGT]?)\) exceeds",
        r"Used (\d+(?:\.\d+)?)([KMGT]?) of",
    )
    for pattern in patterns:
        if match := re.search(pattern, message):
            number, unit = match.groups()
            wanted = int(float(number) * UNITS[unit])
            return replace(found, refused=text, wanted_bytes=wanted)
    return replace(found, refused=text)


def _reported(
    found: CompiledProgram, compiled: Compiled, target: Hardware
) -> CompiledProgram:
    module = hlo.parse(compiled.as_text() or "")
    per_host = target.chips // target.hosts
    cost = roofline.cost(module, target.chip, per_host)
    memory = _memory(compiled)
    refused = ""
    # Not every compiler refuses a program that is larger than the memory.
    if memory.total > target.chip.memory:
        refused = (
            f"It wants {size_text(memory.total)} of each device, "
            f"which has {size_text(target.chip.memory)}."
        )
    costs = compiled.cost_analysis() or {}
    own = costs.get("optimal_seconds", -1.0) if target.chip.platform == "tpu" else -1.0
    arguments = [each.shapes[0] for each in module.entry.parameters]
    shown = [f"{x.dtype}[{','.join(map(str, x.sizes))}]" for x in arguments]
    return replace(
        found,
        bytes_per_device=memory,
        refused=refused,
        wanted_bytes=memory.total,
        collectives=cost.collectives,
        flops=cost.flops,
        bytes_accessed=cost.bytes,
        estimate=roofline.estimate(cost, target.chip),
        # XLA adds -1 for an instruction that it has no estimate of.
        compiler_seconds=own if own >= 0 else None,
        donated=tuple(shown[x] for x in module.aliased_parameters),
        donated_in_vain=tuple(shown[x] for x in module.donated_in_vain),
    )


def _memory(compiled: Compiled) -> DeviceMemory:
    found: Any = compiled.memory_analysis()
    return DeviceMemory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
    )
