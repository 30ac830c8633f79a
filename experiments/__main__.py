"""`python -m experiments [NAME ... | all]`: lists experiments, or runs them."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from experiments import _runner
from experiments._result import Settings

DEVICES = 8
INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 1 if a claim does not hold."""
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
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    try:  # Before the first experiment, whose findings could not be written.
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written, got {error}")
    mpl.use("agg")
    if options.device:
        jax.config.update("jax_platforms", options.device)
    jax.config.update("jax_num_cpu_devices", options.devices)
    _keep_programs(options.out / "programs")
    if missing := _without_device():
        parser.error(missing)
    settings = Settings(
        options.quick, options.devices, options.seed, options.here, str(options.out)
    )
    held = []
    for name in chosen:
        try:
            held.append(_runner.run(name, settings, options.out, console))
        except KeyboardInterrupt:
            console.print(f"[red]interrupted:[/red] {name} has not been finished.")
            return INTERRUPTED
    return 0 if all(held) else 1


def _keep_programs(folder: Path) -> None:
    """Stores compiled programs in `folder`, unless the user has set one."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Programs for absent devices are stored but cannot be read back; they are
        # compiled again, and a warning for each is of no use.
        message = "Error reading persistent compilation cache entry"
        warnings.filterwarnings("ignore", message)
        # JAX's default stores only what took a second to compile: hardly any program
        # here.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _without_device() -> str:
    """The reason why JAX has no device of the requested platform; empty if it has."""
    try:
        jax.devices()
    # For a missing GPU JAX raises an error without a message.
    except (RuntimeError, AssertionError) as error:
        wanted = jax.config.jax_platforms  # type: ignore[attr-defined]
        why = f" ({error})" if str(error) else ""
        return (
            f"no device of the platform {wanted!r} is here{why}; try --device cpu, or "
            "install JAX for it: https://docs.jax.dev/en/latest/installation.html"
        )
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m experiments", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="experiments; all; none: a list"
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter; says what it cannot judge"
    )
    parser.add_argument(
        "--devices", type=int, default=DEVICES, help="at most so many (8)"
    )
    parser.add_argument(
        "--here", action="store_true", help="accelerators: run on this machine's"
    )
    parser.add_argument("--device", help="JAX platform: cpu, cuda, tpu")
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        help="folder of reports, pictures and compiled programs (results)",
    )
    return parser


def _listing(known: Sequence[str]) -> Table:
    table = Table("experiment", "question", box=None, pad_edge=False)
    for name in known:
        table.add_row(name, _runner.summary(_runner.load(name)))
    table.caption = "python -m experiments NAME [--quick]"
    return table


if __name__ == "__main__":
    # A program of another thread, such as the judge's, takes a thread of XLA's pool:
    # with no more than the devices have, the replicas' collectives would wait for it,
    # and XLA would end the process after a minute.
    threads = max(2 * DEVICES, os.cpu_count() or 1)
    os.environ.setdefault("PJRT_NPROC", str(threads))
    status = main()
    if status == INTERRUPTED:
        # Threads of XLA may be inside a program and would crash in its destructors.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
