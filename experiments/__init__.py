"""One script per claim of the source material; each asserts its claim.

`python -m experiments` lists them, `python -m experiments NAME` runs one: progress on
the terminal, then `results/NAME.json`, its pictures as PNG, and `results/report.html`
over everything run so far. The exit status is 1 if a claim does not hold.

An experiment is a module or a package here, with `run(settings, progress) -> Result`;
the first paragraph of its docstring is its entry in the list.
"""

import os

# Read when NumPy is imported. Threads of OpenBLAS spin while they wait for each other:
# beside busy programs a QR decomposition on each of four devices, as in PowerSGD, took
# minutes with two of them, and the others' collectives waited.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
