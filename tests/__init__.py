"""The tests; on import, JAX's MLIR contexts are shared in this process.

JAX makes a context for each program that it lowers. That takes 4 ms, most of what a
small program takes to lower, and the tests lower tens of thousands. What is lowered
does not depend on it (`tests/test_suite.py`), and `make test-thorough` shares none.
"""

import os
import threading

from jax._src.interpreters import mlir

new_context = mlir.make_ir_context
# A context keeps all constants and types that it ever had.
PROGRAMS = 100
_of_thread = threading.local()


def shared_context():
    """The thread's context, and another one after so many programs."""
    context, used = getattr(_of_thread, "context", (None, PROGRAMS))
    if used == PROGRAMS:
        context, used = new_context(), 0
    _of_thread.context = context, used + 1
    return context


if os.environ.get("JDIST_THOROUGH", "") in ("", "0"):
    mlir.make_ir_context = shared_context
