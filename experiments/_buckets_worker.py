"""One of two processes of `ddp_buckets`: the step times of each model and cap."""

import json
import statistics
import sys
import time
from typing import Any

from experiments._pair import join


def main() -> None:
    """Measures; rank 0 prints seconds by model and cap, and by size and cap."""
    rank, job = join(sys.argv[1:])
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from experiments import ddp_buckets as experiment

    mesh = Mesh(np.array(jax.devices()), ("data",))
    warm_up(mesh)
    found: dict[str, Any] = {"models": {}, "sizes": {}}
    for size in job["sizes"]:
        calls = {cap: experiment.sum_of(size, mesh, cap) for cap in ("0", "1000")}
        found["sizes"][size] = race(calls, job["rounds"])
    for name in job["models"]:
        model = experiment.MODELS[name]
        steps = {cap: experiment.step_of(model, mesh, cap) for cap in job["caps"]}
        alone = Mesh(np.array(jax.local_devices()), ("data",))
        # Half of the examples: the share of one process in the steps above.
        half = experiment.Model(model.widths, model.examples // 2)
        steps["compute"] = experiment.step_of(half, alone, None)
        found["models"][name] = race(steps, job["rounds"])
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    jax.distributed.shutdown()


def warm_up(mesh: Any) -> None:
    """Sums a large array first: small sums over a fresh connection can take 50 ms."""
    import jax
    import jax.numpy as jnp

    from jdist.data_parallel import value_and_grad

    fn = value_and_grad(lambda w, x: (x @ w) ** 2, mesh)
    for _ in range(3):
        jax.block_until_ready(fn(jnp.ones(1 << 20), jnp.ones((2, 1 << 20))))


def race(steps: Any, rounds: int) -> dict[str, float]:
    """The median seconds of each step; every round runs all of them in turn."""
    seconds: dict[str, list[float]] = {cap: [] for cap in steps}
    for turn in range(rounds + 3):
        for cap, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 3:
                seconds[cap].append(time.perf_counter() - start)
    return {cap: statistics.median(values) for cap, values in seconds.items()}


if __name__ == "__main__":
    main()
