"""The trial: each stranger that is installed, in each setting, one after the other."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from experiments.strangers.problem import Step
from experiments.strangers.stranger import Finding, Use, judged, lines

INSTALL = "pip install 'jdist[strangers]'"

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
"""A module for each stranger, and what it imports."""

DISTRIBUTIONS = {"tunix": "google-tunix"}
"""Names on the index, where they differ from the module's."""


@dataclass(frozen=True)
class Verdict:
    """What was found of one use in all settings.

    Attributes:
      use: Of the stranger.
      findings: One for each setting.
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
    """What a stranger imports and is not installed.

    Args:
      name: Of its module.
    """
    return [package for package in TRAINERS[name] if find_spec(package) is None]


def tried(
    names: Sequence[str], steps: Sequence[Step], advance: Callable[[str], None]
) -> Iterator[Verdict]:
    """The verdicts on strangers that are installed, use by use.

    Args:
      names: Of their modules.
      steps: One for each setting.
      advance: Is told each stranger's name before it trains.
    """
    # Keras reads its backend when it is imported, and from nowhere else.
    os.environ["KERAS_BACKEND"] = "jax"
    for name in names:
        advance(name)
        module = importlib.import_module(f"experiments.strangers.{name}")
        for use in module.USES:
            findings = [judged(use, step) for step in steps]
            yield Verdict(use, findings, lines(module))


def versions() -> dict[str, str]:
    """Of all packages on trial that are installed."""
    packages = dict.fromkeys(p for needed in TRAINERS.values() for p in needed)
    return {
        package: metadata.version(DISTRIBUTIONS.get(package, package))
        for package in packages
        if find_spec(package) is not None
    }
