"""Where a figure comes from: machine, device, versions."""

import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import jax


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine, device and versions that a measurement depends on."""

    machine: str = field(default_factory=platform.platform)
    processor: str = field(default_factory=lambda: _processor())
    cores: int = field(default_factory=lambda: _cores())
    device: str = field(default_factory=lambda: jax.devices()[0].device_kind)
    devices: int = field(default_factory=jax.device_count)
    python: str = field(default_factory=platform.python_version)
    jax: str = jax.__version__
    jdist: str = field(default_factory=lambda: metadata.version("jdist"))


def _cores() -> int:
    """The cores that this process may use; pinning reduces them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    return next(models, platform.processor()).strip()
