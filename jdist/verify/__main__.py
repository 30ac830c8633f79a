"""`python -m jdist.verify`: is every strategy's gradient the one-device gradient?

Without a problem, the equivalence matrix over all installed strategies. With
`module:name`, the same judgement on your own loss, parameters, batch and candidates.
Exits 1 if anything fails.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import track

from jdist._compat import set_cpu_device_count
from jdist._errors import JdistError
from jdist.verify import matrix
from jdist.verify.oracle import REDUCERS
from jdist.verify.problem import load

console = Console()
error_console = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 for a failure, 2 for misuse."""
    options = _parser().parse_args(arguments)
    set_cpu_device_count(options.cpu_devices)
    if options.device:
        jax.config.update("jax_platforms", options.device)
    # A ValueError about a user's problem is theirs to mend; any other is a bug of ours.
    misuse = (JdistError, ValueError) if options.problem else (JdistError,)
    try:
        return _judge_problem(options) if options.problem else _judge_matrix(options)
    except misuse as error:
        error_console.print(f"[red]error:[/red] {error}", highlight=False)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m jdist.verify", description=__doc__)
    parser.add_argument("problem", nargs="?", help="module:name of a verify.Problem")
    parser.add_argument(
        "--dtypes", nargs="+", choices=matrix.DTYPES, default=matrix.DTYPES
    )
    parser.add_argument(
        "--reductions", nargs="+", choices=tuple(REDUCERS), default=tuple(REDUCERS)
    )
    parser.add_argument("--rows", default="", help="only strategies with this in them")
    parser.add_argument(
        "--json", type=Path, help="also write all findings to this file"
    )
    parser.add_argument("--device", help="JAX platform: cpu, cuda, tpu")
    parser.add_argument(
        "--cpu-devices", type=int, default=8, help="CPU devices to offer (default 8)"
    )
    return parser


def _judge_problem(options: argparse.Namespace) -> int:
    report = load(options.problem).judge()
    console.print(report)
    if options.json:
        options.json.write_text(report.to_json())
    console.print(_verdict(report.ok, f"{options.problem} holds"))
    return 0 if report.ok else 1


def _judge_matrix(options: argparse.Namespace) -> int:
    known = matrix.strategies()
    rows = {name: build for name, build in known.items() if options.rows in name}
    if not rows:
        names = ", ".join(known)
        raise JdistError(
            f"no strategy has {options.rows!r} in its name; known: {names}"
        )
    columns = len(options.dtypes) * len(options.reductions)
    judged = matrix.judge(rows, options.reductions, options.dtypes)
    progress = track(judged, "judging", columns, console=console, transient=True)
    cells = [cell for column in progress for cell in column]
    console.print(matrix.table(cells))
    for reason in sorted({f"{c.strategy}: {c.skipped}" for c in cells if c.skipped}):
        console.print(f"[yellow]skipped[/yellow] {reason}")
    for cell in cells:
        if not cell.ok:
            console.print(f"\n[bold]{cell.reduction}, {cell.dtype}[/bold]", cell.report)
    if options.json:
        options.json.write_text(matrix.to_json(cells))
    count = sum(cell.report is not None for cell in cells)
    ok = count > 0 and all(cell.ok for cell in cells)
    text = f"{count} of {len(cells)} gradients judged, all equal to one device's"
    console.print(_verdict(ok, text))
    return 0 if ok else 1


def _verdict(ok: bool, text: str) -> str:
    return f"[bold green]{text}[/bold green]" if ok else "[bold red]FAILED[/bold red]"


if __name__ == "__main__":
    sys.exit(main())
