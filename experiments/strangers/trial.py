"""The trial: each stranger that is installed, in each setting, one after the other."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from experiments.strangers.problem import Step
from experiments.strangers.stranger import Finding, Use, judged, lines

INSTALL = "pip install '.[strangers]', in the folder of jdist"

TRAINERS = {
    "optax_multisteps": ("optax",),
    "flax_optimizer": ("flax", "optax"),
    "keras_fit": ("keras",),
    "keras_distribution": ("keras",),
    "tunix_trainer": ("tunix", "flax", "optax"),
    "accelerate_loop": ("accelerate", "torch"),
    "lightning_trainer": ("lightning", "torch"),
    "huggingface_trainer": ("transformers", "accelerate", "torch"),
    "torch_ddp": ("torch",),
}
"""The module of each stranger, and the packages that it imports."""

DISTRIBUTIONS = {"tunix": "google-tunix"}
"""Names on the package index that differ from the module's."""


@dataclass(frozen=True)
class Verdict:
    """The findings on one use in all settings.

    Attributes:
      use: The use of a stranger.
      findings: A finding for each setting.
      lines: Lines of code that a user adds to have it judged.
    """

    use: Use
    findings: Sequence[Finding]
    lines: int

    @property
    def judged(self) -> list[Finding]:
        """The findings on gradients."""
        return [f for f in self.findings if f.verdict in ("right", "wrong", "no step")]

    @property
    def word(self) -> str:
        """The verdict on all settings, in words."""
        right = [f.setting for f in self.judged if f.verdict == "right"]
        refused = [f.setting for f in self.findings if f.verdict == "refused"]
        word = f"right only if {' or '.join(right)}" if right else "wrong"
        if len(right) == len(self.judged):
            word = "right" if right else "not judged"
        return f"{word}; refuses {', '.join(refused)}" if refused else word


def absent(name: str) -> list[str]:
    """The packages that a stranger imports and that are not installed.

    Args:
      name: The name of its module.
    """
    return [package for package in TRAINERS[name] if find_spec(package) is None]


def tried(
    names: Sequence[str], steps: Sequence[Step], advance: Callable[[str], None]
) -> Iterator[Verdict]:
    """Yields the verdicts on installed strangers, use by use.

    Args:
      names: The names of their modules.
      steps: A step for each setting.
      advance: Called with each stranger's name before it trains.
    """
    # Keras reads its backend from here when it is imported.
    os.environ["KERAS_BACKEND"] = "jax"
    for name in names:
        advance(name)
        module = importlib.import_module(f"experiments.strangers.{name}")
        for use in module.USES:
            findings = [judged(use, step) for step in steps]
            yield Verdict(use, findings, lines(module))


def versions() -> dict[str, str]:
    """The versions of all installed packages on trial."""
    packages = dict.fromkeys(p for needed in TRAINERS.values() for p in needed)
    return {
        package: metadata.version(DISTRIBUTIONS.get(package, package))
        for package in packages
        if find_spec(package) is not None
    }
