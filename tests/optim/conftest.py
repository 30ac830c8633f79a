"""Without torch the files that import it cannot be collected, only `make parity` can."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["torch_runs.py", "test_parity.py"]
