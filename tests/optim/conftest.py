"""Files that import torch are collected only where it is, as in `make parity`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["torch_runs.py", "test_parity.py"]
