"""A program in which something happens to one process while the others wait for it."""

import os
import signal
import sys

import jax
import jax.numpy as jnp

from jdist.data_parallel import replicate, value_and_grad
from jdist.data_parallel.data.process_group import process_group

module = sys.modules["jdist.data_parallel.data.process_group"]


def plant(mode):
    """What happens to the process that it is to happen to."""
    if mode == "raise":
        raise ValueError("planted")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[mode])


def main(mode, rank):
    """Steps without end, until it happens after the third."""
    cluster = "slurm" if mode == "cluster" else None
    if mode == "return":
        # The start may take a minute; to wait so long at the end would show no more.
        early_end = module._early_end
        module._early_end = lambda timeout: early_end(timeout / 30)
    with process_group(heartbeat=3, timeout=60, cluster=cluster) as mesh:
        fn = value_and_grad(lambda w, x: x @ w, mesh)
        params = replicate(jnp.ones(3), mesh)
        x = replicate(jnp.ones((mesh.size, 3)), mesh)
        for number in range(10**9):
            if (number, jax.process_index()) == (3, rank):
                if mode == "return":
                    return
                plant(mode)
            jax.block_until_ready(fn(params, x))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
