"""Calls of other workers' functions that JAX itself can differentiate.

    y = autograd.remote_call("worker1", fn, x)

`call` is the public function, `primitive` what JAX knows of it, `operations` how
transformations travel, `callee` and `caller` the two ends, `callback` and `pool` the
call inside compiled programs.
"""

from jdist.autograd.remote_call.call import remote_call as remote_call
