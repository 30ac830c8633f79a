"""Compilers for unattached hardware: their devices and versions."""

import contextlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import topologies

from jdist._errors import Unavailable, extra, requirement, value_error
from jdist.targets.chips import Chip, Gpu

QUIET_TPU = {
    # Otherwise libtpu queries the metadata server of Google Cloud for its identity.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    # A process that only compiles does not lock out one that uses a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
HOST_CHIPS = {"v5e": 8, "v6e": 8}
"""Chips of the largest single host, if that has more than the 4 of a host in a larger
slice."""


def devices(chip: Chip, shape: tuple[int, ...]) -> tuple[jax.Device, ...]:
    """Devices of unattached hardware, for use in a mesh.

    Args:
      chip: The kind of chip.
      shape: Chips along each axis of a TPU slice; hosts and GPUs of each.

    Raises:
      Unavailable: The compiler is not installed, is not of JAX's version, or the CPU
        has fewer devices; the message says what to do.
      ValueError: The compiler knows no such slice.
    """
    if chip.platform == "cpu":
        return _cpu_devices(math.prod(shape))
    _check_versions(chip.platform)
    name = f"{chip.name}:{'x'.join(map(str, shape))}"
    try:
        if chip.platform == "tpu":
            with _environment(QUIET_TPU):
                bounds = host_bounds(chip, shape)
                topology = topologies.get_topology_desc(
                    name, platform="tpu", chips_per_host_bounds=bounds
                )
        else:
            hosts, gpus = shape
            topology = topologies.get_topology_desc(
                chip.name,
                platform="cuda",
                target_config=_gpu_text(chip),
                topology=f"{hosts}x1x{gpus}",
            )
    except jax.errors.JaxRuntimeError as error:
        # All PJRT errors have one exception type; the status code is in the text.
        if "INVALID_ARGUMENT" not in str(error):
            raise
        rule = "must be a slice that the compiler knows"
        raise value_error("target", rule, f"{name} ({error})") from error
    except NotImplementedError as error:
        rule = f"needs JAX's plugin for {chip.platform}, which JAX has not loaded"
        remedy = (
            "Without a GPU, JAX loads it only if it is told to run on something else: "
            "set JAX_PLATFORMS=cpu before JAX is imported."
        )
        got = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise Unavailable(requirement("targets", rule, got, remedy)) from error
    return tuple(topology.devices)


def host_bounds(chip: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Chips of one TPU host along each of three axes."""
    full = (*shape, 1, 1)[:3]
    if math.prod(shape) <= HOST_CHIPS.get(chip.name, 4):
        # A slice within one host has no host boundaries.
        return full
    # Larger slices are made of hosts with 2 x 2 chips.
    return tuple(min(size, bound) for size, bound in zip(full, (2, 2, 1), strict=True))


def compiler_options(chip: Chip) -> dict[str, str | bool]:
    """Options of `Lowered.compile` for a chip: the folder of CUDA's assembler."""
    if chip.platform != "cuda":
        return {}
    for file in importlib.metadata.files("nvidia-cuda-nvcc-cu12") or ():
        if file.name == "ptxas":
            folder = Path(str(file.locate())).parents[1]
            return {"xla_gpu_cuda_data_dir": str(folder)}
    return {}


def _cpu_devices(count: int) -> tuple[jax.Device, ...]:
    here = jax.devices("cpu")
    if len(here) < count:
        rule = f"needs {count} CPU devices"
        remedy = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes them."
        raise Unavailable(requirement("target", rule, f"{len(here)}", remedy))
    return tuple(here[:count])


def _check_versions(platform: str) -> None:
    """Raises unless the compiler is installed in the version that JAX requires."""
    for name, wanted in _packages(platform).items():
        remedy = (
            f"{extra(platform)} installs the compiler that fits; no hardware is needed."
        )
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            rule = f"needs the package {name} for a {platform} target"
            raise Unavailable(
                requirement("targets", rule, "an environment without it", remedy)
            ) from error
        if wanted and not re.fullmatch(wanted, found):
            jaxlib = importlib.metadata.version("jaxlib")
            rule = f"needs the {name} that fits jaxlib {jaxlib}"
            raise Unavailable(requirement("targets", rule, found, remedy))


def _packages(platform: str) -> dict[str, str]:
    """Packages of a platform's compiler, each with a pattern of its versions."""
    jaxlib = re.escape(importlib.metadata.version("jaxlib"))
    if platform == "cuda":
        names = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
        # Later builds of one version have a suffix, such as 0.10.2.post1.
        return dict.fromkeys(names, rf"{jaxlib}(\.post\d+)?") | {
            "nvidia-cuda-nvcc-cu12": ""
        }
    # JAX states what it was built with, as `libtpu==0.0.42.*; extra == "tpu"`.
    for line in importlib.metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*==\s*([\d.]+)(\.\*)?\s*;", line):
            exact, more = match.groups()
            return {"libtpu": re.escape(exact) + (r"(\..*)?" if more else "")}
    return {"libtpu": ""}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are unset, for the duration of a block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        # They describe other hardware: an attached TPU must not be configured by them.
        for name in added:
            os.environ.pop(name, None)


def _gpu_text(chip: Chip) -> str:
    """XLA's `GpuTargetConfig` as text."""
    if chip.gpu is None:
        rule = "must say what the compiler needs of a GPU"
        raise value_error("Chip(gpu=...)", rule, chip.gpu)
    gpu: Gpu = chip.gpu
    major, minor = gpu.compute_capability
    dnn_major, dnn_minor = gpu.cudnn
    # Constants are limits that all supported GPUs share.
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 * 2**10,
        # CUDA reserves 1 KiB of shared memory for each block.
        "shared_memory_per_block_optin": gpu.shared_memory - 2**10,
        "shared_memory_per_core": gpu.shared_memory,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units_per_core,
        "clock_rate_ghz": gpu.clock,
        "l2_cache_size": gpu.cache,
        "memory_bandwidth": int(chip.bandwidth),
        "device_memory_size": chip.memory,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in limits.items())
    return f"""gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} }}
device_description_str: "{gpu.name}"
"""
