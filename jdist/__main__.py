"""`python -m jdist`: a list of the commands, one line each."""

import importlib.util
import sys
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import jdist

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "jdist.launch": "starts the workers of one machine, as torchrun does",
    "jdist.verify": "judges every strategy's gradient, or your own",
    "jdist.targets": "compiles a step for TPUs or GPUs that are not here",
    "experiments": "lists and runs the experiments and their claims",
    "benchmarks": "measures speed, also against PyTorch",
}
"""Modules with a command line; the last two are in a checkout only."""


def main() -> int:
    """Prints the commands that are available; returns the exit status."""
    console = Console(highlight=False)
    console.print(f"jdist {jdist.__version__}, with JAX {jax.__version__}")
    table = Table(box=None, pad_edge=False, show_header=False)
    for module, what in filter(_is_ours, COMMANDS.items()):
        table.add_row(f"python -m {module}", what)
    table.add_row("python -m pydoc jdist", "the parts of the library, and their docs")
    # Lines are meant to be copied: neither wrapped nor cut at the width of the
    # terminal.
    console.print(table, no_wrap=True, crop=False)
    console.print("Each command has --help.", _guides(), soft_wrap=True)
    return 0


def _is_ours(command: tuple[str, str]) -> bool:
    """Whether a command belongs to this installation of jdist."""
    module, _ = command
    if module.startswith("jdist."):
        return True
    # Beside an installed jdist any other package may be named `experiments`.
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return False
    in_checkout = (ROOT / "pyproject.toml").is_file()
    return in_checkout and Path(found.origin).is_relative_to(ROOT)


def _guides() -> str:
    """Where to read more: files of a checkout, or what every installation has."""
    if (ROOT / "docs" / "launch.md").is_file():
        return f"The guides: {ROOT / 'README.md'}, {ROOT / 'docs'}."
    return "In Python, `help(jdist)` tells of its parts, `help(jdist.verify)` of one."


if __name__ == "__main__":
    sys.exit(main())
