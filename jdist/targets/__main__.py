"""`python -m jdist.targets module:job --target v5e:4x4`: compile without the hardware.

A job is a function of the hardware, and of the batch size if it has one, that returns
the function to compile and the shapes of its arguments:

    def job(hardware, batch=256):
        mesh = hardware.mesh({"data": hardware.chips})
        ...
        return train_step, params, batch_shapes

The report says whether it fits on each target. All seconds are estimates.

exit status:
  0  it fits on every target; or a batch, or a slice, was found on which it does
  1  it does not fit
  2  a wrong call: an option, what `module:job` stands for, a compiler that is missing
  4  code raised an error: yours, JAX's or ours; its traceback is shown
  130  it was interrupted
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from enum import IntEnum

import jax
from rich.console import Console
from rich.text import Text

from jdist._errors import JdistError
from jdist._own_code import run_command, writable_file
from jdist.targets.hardware import target
from jdist.targets.job import Job, load, program_of
from jdist.targets.report import seconds_text, size_text
from jdist.targets.search import Candidate, SearchResult, largest_batch, smallest_slice

console = Console()


class ExitStatus(IntEnum):
    """The command's exit status."""

    FITS = 0
    DOES_NOT_FIT = 1
    MISUSE = 2
    RAISED = 4
    INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, see `ExitStatus`."""
    options = _parser().parse_args(arguments)
    # No target is attached hardware, whose initialization would take seconds.
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")

    # A ValueError is a usage error: what the job itself raises is `OwnCodeRaised`.
    misuse = (JdistError, ValueError)
    return run_command(lambda: _report(load(options.job), options), misuse)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m jdist.targets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", help="module:name of a job")
    parser.add_argument(
        "--target",
        nargs="+",
        required=True,
        metavar="NAME",
        help="such as v5e:4x4, v5p:2x2x4, v6e:16x16, h100:2x8, a100:1x8, b200:1x8",
    )
    parser.add_argument("--batch", type=int, help="batch size for the job")
    search = parser.add_mutually_exclusive_group()
    search.add_argument(
        "--largest-batch",
        action="store_true",
        help="find the largest batch that fits on each target, to 5 %%",
    )
    search.add_argument(
        "--smallest-slice",
        action="store_true",
        help="find the smallest slice of each target's chip on which it fits",
    )
    parser.add_argument(
        "--json", type=writable_file, help="also write everything to this file"
    )
    return parser


def _report(job: Job, options: argparse.Namespace) -> ExitStatus:
    records, fits = [], True
    for name in options.target:
        result = _found(job, name, options)
        fits = fits and result.best is not None
        # A candidate that the job refused has no program to report.
        for each in result.tried:
            if each.program:
                record = json.loads(each.program.to_json())
                records.append({"label": _label(each), **record})
        if result.best and result.best.program:
            console.print(result.best.program)
        elif not options.largest_batch and not options.smallest_slice:
            console.print(result.tried[0].program)
        if result.best and options.largest_batch:
            _announce(f"largest batch that fits {name}: {result.best.batch}")
        if result.best and options.smallest_slice:
            _announce(f"smallest on which it fits: {result.best.target}")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    if fits:
        return ExitStatus.FITS
    console.print("[bold red]DOES NOT FIT[/bold red]")
    return ExitStatus.DOES_NOT_FIT


def _announce(text: str) -> None:
    # `Text`, because rich would read brackets in a string as markup.
    console.print(Text(text, style="bold green"))


def _found(job: Job, name: str, options: argparse.Namespace) -> SearchResult:
    """What was compiled for a target: by a search, or once."""
    hardware = target(name)
    if options.largest_batch:
        return largest_batch(job, hardware, on_candidate=_tell)
    if options.smallest_slice:
        chip = hardware.chip.name
        return smallest_slice(job, chip, batch=options.batch, on_candidate=_tell)
    with console.status(f"compiling for {name} ..."):
        program = program_of(job, hardware, options.batch)
    only = Candidate(name, None, program)
    return SearchResult(only if only.fits else None, (only,))


def _tell(candidate: Candidate) -> None:
    program = candidate.program
    if program is None:
        told = f"refused by the job: {candidate.refusal}"
    elif not program.fits:
        told = f"does not fit: {program.refused}"
    else:
        wanted = size_text(program.wanted_bytes or 0)
        told = f"fits, {wanted} of each device"
        if program.seconds is not None:
            told += f", {seconds_text(program.seconds)} a step (estimate)"
    console.print(Text(f"{_label(candidate)}: {told}"))


def _label(candidate: Candidate) -> str:
    if candidate.batch is None:
        return candidate.target
    return f"{candidate.target}, batch {candidate.batch}"


if __name__ == "__main__":
    sys.exit(main())
