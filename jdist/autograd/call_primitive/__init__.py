"""Calls of other workers' functions that JAX itself can differentiate.

    y = autograd.remote_call("worker1", fn, x)

- `primitive`: the public function, and its rules for JAX's transformations;
  `transforms`: transformations as data.
- `caller` and `callee`: the two ends; `arguments`: what they exchange.
- `callback`: the call inside compiled programs.
"""

__all__: list[str] = []
