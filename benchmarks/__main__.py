"""`python -m benchmarks [NAME ...]`: runs benchmarks, prints tables, writes JSON."""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

import benchmarks
from benchmarks import _harness, _record
from experiments import _runner
from experiments._result import Settings


def main() -> None:
    """Runs the named benchmarks, or all; exits with status 1 if one fails."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    names = [module.name for module in modules if not module.name.startswith("_")]
    names += _record.EXPERIMENTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/bench"),
        help="folder of the figures (results/bench)",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the figures: benchmarks/recorded.json, and the pages written from "
        "it, docs/benchmarks.md and docs/benchmarks_all.md",
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    # Two devices for the benchmarks that compare them. The second costs nothing until
    # it is used: both share the same threads.
    jax.config.update("jax_num_cpu_devices", 2)
    if failed := run(options.names or names, options.out, options.record):
        sys.exit(f"failed, and no figures were kept of: {', '.join(failed)}")


def run(names: Sequence[str], folder: Path, record: bool) -> list[str]:
    """Runs benchmarks one after another; returns the names of those that failed."""
    console, failed = Console(), []
    for name in names:
        try:
            found = _run(name, folder, console)
        # One failure must not cost the others' figures, which take an hour.
        except Exception:  # noqa: BLE001
            console.print_exception()
            failed.append(name)
            continue
        if earlier := _record.recorded().get(name):
            for line in _record.worse(earlier, found):
                console.print(f"[red]worse than recorded[/red]: {line}")
        if record:
            _record.record({name: found})
            _record.draw(name)
    return failed


def _run(name: str, folder: Path, console: Console) -> _record.Run:
    """Runs one benchmark, or one experiment whose tables are figures of speed."""
    start = time.perf_counter()
    if name not in _record.EXPERIMENTS:
        cases = _measured(name, folder, console)
        return _record.run(cases, seconds=time.perf_counter() - start)
    # A folder of its own, because an experiment's page shows every record of its folder
    # and cannot read those of benchmarks.
    folder = folder / "experiments"
    if not _runner.run(name, Settings(), folder, console):
        raise RuntimeError(f"{name} does not hold, so its figures are of no use")
    tables = json.loads((folder / f"{name}.json").read_text())["tables"]
    return _record.run(tables=tables, seconds=time.perf_counter() - start)


def _measured(name: str, folder: Path, console: Console) -> list[_harness.Case]:
    module = importlib.import_module(f"benchmarks.{name}")
    question = (module.__doc__ or "").splitlines()[0]
    console.print(f"[bold]{name}[/bold]: {question}")
    cases: list[_harness.Case] = module.measure()
    console.print(_harness.table(name, cases))
    console.print(f"written to {_harness.write(folder, name, cases)}\n")
    return cases


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        Console(stderr=True).print("[red]interrupted[/red]")
        # A normal exit would run XLA's destructors, which crash while a program still
        # runs.
        os._exit(130)
