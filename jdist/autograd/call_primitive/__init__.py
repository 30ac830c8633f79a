"""Calls of other workers' functions that JAX itself can differentiate.

    y = autograd.remote_call("worker1", fn, x)

- `call`: the public function; `primitive`: its rules for JAX's transformations;
  `transforms`: transformations as data.
- `caller` and `callee`: the two ends; `arguments` and `variables`: what they exchange.
- `callback` and `callback_threads`: the call inside compiled programs.
"""

__all__: list[str] = []
