"""A program: training over meshes that span two processes, of which one is killed."""

import os
import signal

import jax
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim, pipeline
from tests.pipeline import language_blocks as blocks


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    with data_parallel.process_group():
        devices = np.array(jax.devices()).reshape(2, 2)
        places = pipeline.OneProgram(Mesh(devices.T, ("stage", "data")))
        options = {"optimizer": optim.adam(lr=1e-2)}
        pipe = blocks.pipeline_of(pipeline.gpipe(2, 3), places, **options)
        params, batch, weights = blocks.problem(2)
        state = pipe.init(params)
        for step in range(100):
            if step == 2 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state, metrics = pipe.train_step(state, batch, weights)
            float(metrics.loss)


if __name__ == "__main__":
    main()
