"""`python -m benchmarks [NAME ...]`: runs benchmarks, prints tables, writes JSON."""

import argparse
import importlib
import json
import os
import pkgutil
import time
from pathlib import Path

import jax
from rich.console import Console

import benchmarks
from benchmarks import _harness, _record
from experiments import _runner
from experiments._result import Settings


def main() -> None:
    """Runs the named benchmarks, or all."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    names = [module.name for module in modules if not module.name.startswith("_")]
    names += _record.EXPERIMENTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the figures: benchmarks/recorded.json, and docs/benchmarks.md, "
        "whose tables are written from it",
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    # A second CPU device costs nothing until it is used: both share the threads.
    jax.config.update("jax_num_cpu_devices", 2)
    console = Console()
    for name in options.names or names:
        start = time.perf_counter()
        if name in _record.EXPERIMENTS:
            _runner.run(name, Settings(), options.out, console)
            result = json.loads((options.out / f"{name}.json").read_text())
            seconds = time.perf_counter() - start
            found = _record.run(tables=result["tables"], seconds=seconds)
        else:
            cases = _measured(name, options.out, console)
            found = _record.run(cases, seconds=time.perf_counter() - start)
        if earlier := _record.recorded().get(name):
            for line in _record.worse(earlier, found):
                console.print(f"[red]worse than recorded[/red]: {line}")
        if options.record:
            _record.record({name: found})


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
        os._exit(130)  # XLA's destructors don't survive a program that still runs.
