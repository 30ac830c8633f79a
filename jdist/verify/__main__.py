"""`python -m jdist.verify`: is every strategy's gradient the one-device gradient?

Without a problem, the equivalence matrix over all installed strategies, a line for each
as it is done; in float32, unless other dtypes are chosen. `--all` adds combinations of
what these show. With `module:name`, the same judgement on your own loss, parameters,
batch and candidates.

exit status:
  0  everything was judged and holds
  1  a gradient is wrong, or the reference is not the derivative of its loss
  2  a wrong call: an option, or what `module:name` stands for
  3  nothing is wrong, but something could not be judged, or nothing was judged
  4  code raised an error: yours, a strategy's or the judge's; its traceback is shown
  130  it was interrupted
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

import jax
from rich.console import Console
from rich.text import Text

from jdist._compat import require_backend
from jdist._errors import JdistError
from jdist._own_code import run_command, writable_file
from jdist.verify import matrix
from jdist.verify.oracle import REDUCERS
from jdist.verify.problem import load
from jdist.verify.report import Report

console = Console()


class Status(IntEnum):
    """The command's exit status."""

    HOLDS = 0
    WRONG = 1
    MISUSE = 2
    NOT_JUDGED = 3
    RAISED = 4
    INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, see `Status`."""
    options = _parser().parse_args(arguments)
    options.devices = matrix.Devices(options.cpu_devices, options.device)
    # JAX takes the number of CPU devices only before its first computation.
    options.devices.set_up()
    # What a user's own functions raise is OwnCodeRaised, so a ValueError about their
    # problem is a wrong call; one from the matrix is a bug of a strategy's or of ours.
    misuse = (JdistError, ValueError) if options.problem else (JdistError,)

    def run() -> int:
        require_backend()
        return _judge_problem(options) if options.problem else _judge_matrix(options)

    return run_command(run, misuse)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m jdist.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", nargs="?", help="module:name of a verify.Problem")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=matrix.DTYPES,
        default=matrix.DTYPES[:1],
        help="dtypes of the matrix's models (default float32)",
    )
    parser.add_argument(
        "--reductions",
        nargs="+",
        choices=tuple(REDUCERS),
        default=tuple(REDUCERS),
        help="reductions of the matrix's losses (default all)",
    )
    parser.add_argument(
        *("-k", "--rows"),
        dest="rows",
        default="",
        metavar="TEXT",
        help="only strategies with this in their names, combinations among them",
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="judge a loss whose derivative rules clip cotangents, for mean and sum",
    )
    parser.add_argument(
        "--all", action="store_true", help="also combinations of what other rows show"
    )
    parser.add_argument(
        "--processes",
        type=_count,
        help="strategies to judge in parallel (default 2, on an accelerator 1)",
    )
    parser.add_argument(
        "--json", type=writable_file, help="also write all findings to this file"
    )
    parser.add_argument(
        "--no-finite-differences",
        dest="finite_differences",
        action="store_false",
        help="do not hold the reference itself against a finite difference",
    )
    parser.add_argument("--device", help="JAX platform: cpu, cuda, tpu")
    parser.add_argument(
        "--cpu-devices", type=_count, default=8, help="CPU devices to offer (default 8)"
    )
    return parser


def _judge_problem(options: argparse.Namespace) -> int:
    problem = load(options.problem).guarded()
    if not options.finite_differences:
        problem = replace(problem, finite_differences=False)
    report = problem.judge()
    console.print(report)
    if options.json:
        options.json.write_text(report.to_json())
    return _concluded([report], f"{options.problem} holds")


def _judge_matrix(options: argparse.Namespace) -> int:
    if not options.finite_differences:
        raise JdistError("--no-finite-differences goes with a problem, module:name")
    options.reductions = _reductions(options)
    # Printed first: importing strategies and compiling the first one take longer.
    console.print("largest error/bound (a right answer stays below 1)")
    console.print(matrix.heading(options.reductions))
    rows, left = _chosen(options)
    cells: list[matrix.Cell] = []
    for row in _rows(rows, options):
        if row[0].strategy not in {cell.strategy for cell in cells}:
            # `Text`, because rich would read brackets in a name as markup.
            console.print(Text(row[0].strategy, style="bold"))
        console.print(matrix.line(row))
        cells += row
    for reason in sorted({f"{c.strategy}: {c.skipped}" for c in cells if c.skipped}):
        # `Text`, because the name of an extra stands in brackets.
        console.print(Text.assemble(("skipped", "yellow"), f" {reason}"))
    if left:
        console.print(f"{left} more combinations of these are judged with --all")
    for cell in cells:
        if not cell.ok:
            console.print(f"\n[bold]{cell.reduction}, {cell.dtype}[/bold]", cell.report)
    if options.json:
        options.json.write_text(matrix.to_json(cells))
    reports = [cell.report for cell in cells if cell.report is not None]
    text = f"{len(reports)} of {len(cells)} gradients judged, all equal to one device's"
    text += f" in {', '.join(options.dtypes)}"
    return _concluded(reports, text)


def _reductions(options: argparse.Namespace) -> Sequence[str]:
    """Those to judge: not every row knows an extreme before its backward pass."""
    chosen: Sequence[str] = options.reductions
    if options.rules:
        chosen = [name for name in chosen if name in ("mean", "sum")]
    if not chosen:
        raise JdistError("--rules is for the reductions mean and sum")
    return chosen


def _chosen(options: argparse.Namespace) -> tuple[Mapping[str, matrix.Strategy], int]:
    """The rows to judge, and how many combinations are left to `--all`."""
    known = matrix.strategies()
    if options.all or options.rows:
        rows = {name: build for name, build in known.items() if options.rows in name}
        if not rows:
            names = ", ".join(known)
            raise JdistError(
                f"no strategy has {options.rows!r} in its name; known: {names}"
            )
        return rows, 0
    rows = matrix.strategies(combinations=False)
    return rows, len(known) - len(rows)


def _rows(
    rows: Mapping[str, matrix.Strategy], options: argparse.Namespace
) -> Iterator[list[matrix.Cell]]:
    chosen = options.reductions, options.dtypes
    problem = "rules" if options.rules else "standard"
    # Two processes cannot share an accelerator.
    processes = options.processes or (2 if jax.default_backend() == "cpu" else 1)
    # A process without a row would only be started and ended.
    count = min(processes, len(rows))
    if count == 1:
        return matrix.judge(rows, *chosen, problem)
    given = list(rows), *chosen, count, options.devices
    return matrix.judge_in_processes(*given, problem)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _concluded(reports: Sequence[Report], text: str) -> Status:
    """The last line and the exit status: what is wrong outweighs what is not judged."""
    if any(map(_wrong, reports)):
        console.print("[bold red]FAILED[/bold red]")
        return Status.WRONG
    # Nothing judged proves nothing, although `all` of nothing is true.
    if not reports or not all(report.ok for report in reports):
        console.print("[bold yellow]NOT JUDGED[/bold yellow]")
        return Status.NOT_JUDGED
    console.print(f"[bold green]{text}[/bold green]")
    return Status.HOLDS


def _wrong(report: Report) -> bool:
    oracle = report.oracle
    return bool(report.failures) or (oracle is not None and oracle.wrong)


if __name__ == "__main__":
    sys.exit(main())
