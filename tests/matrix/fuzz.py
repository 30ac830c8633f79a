"""`make fuzz`: the library's own trainers in layouts of their options, for some time.

First all pairs of values of two options, then random layouts until the seconds are
over. Exit status 1 if a layout fails; the report has the smallest one.
"""

import argparse
import sys

import jax
from rich.console import Console

from jdist import verify
from tests.matrix import (
    elastic_layouts,
    local_sgd_layouts,
    pipedream_layouts,
    pipeline_layouts,
    test_layouts,
)

TRAINERS = {
    "data_parallel.train_step": test_layouts,
    "Pipeline": pipeline_layouts,
    "PipeDream": pipedream_layouts,
    "Elastic": elastic_layouts,
    "LocalSGD": local_sgd_layouts,
}


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m tests.matrix.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 8)
    console, held = Console(), []
    for name, own in TRAINERS.items():
        found = verify.fuzz(
            own.problem,
            own.claim,
            own.trainer,
            axes=own.AXES,
            model=own.MODEL,
            valid=own.valid,
            seconds=given.seconds / len(TRAINERS),
        )
        console.print(f"[bold]{name}[/bold]", found, sep="\n")
        held.append(found.ok)
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
