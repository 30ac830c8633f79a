"""`python -m experiments [NAME ... | all]`: lists experiments, or runs them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from experiments import _runner
from experiments._result import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 if a claim does not hold."""
    console = Console()
    known = _runner.names()
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.names:
        console.print(_listing(known))
        return 0
    chosen = known if options.names == ["all"] else options.names
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(
            f"no experiment {', '.join(unknown)}; there are {', '.join(known)}"
        )
    if options.devices < 1:
        parser.error(f"--devices must be at least 1, got {options.devices}")
    mpl.use("agg")
    if options.device:
        jax.config.update("jax_platforms", options.device)
    jax.config.update("jax_num_cpu_devices", options.devices)
    settings = Settings(options.quick, options.devices, options.seed)
    held = [_runner.run(name, settings, options.out, console) for name in chosen]
    return 0 if all(held) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="shorter; says what it cannot judge"
    )
    parser.add_argument("--devices", type=int, default=8, help="at most so many (8)")
    parser.add_argument("--device", help="JAX platform: cpu, cuda, tpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser


def _listing(known: Sequence[str]) -> Table:
    table = Table("experiment", "question", box=None, pad_edge=False)
    for name in known:
        table.add_row(name, _runner.summary(_runner.load(name)))
    table.caption = "python -m experiments NAME [--quick]"
    return table


if __name__ == "__main__":
    sys.exit(main())
