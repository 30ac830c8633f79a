"""`remote_call`: a function on another worker, inside JAX's transformations."""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.autograd.call_primitive.arguments import abstract_of, taken_apart
from jdist.autograd.call_primitive.caller import Target, caller_of
from jdist.autograd.call_primitive.primitive import bind
from jdist.rpc import WorkerInfo
from jdist.rpc.extension import DEFAULT, check_timeout, current_agent, named


def remote_call(
    to: str | int | WorkerInfo,
    fn: Callable[..., PyTree],
    *args: PyTree,
    kwargs: Mapping[str, PyTree] | None = None,
    timeout: float = DEFAULT,
) -> PyTree:
    """`fn(*args, **kwargs)` computed on the worker `to`, as a function of JAX.

    It can stand in `jax.grad`, `jax.vjp`, `jax.value_and_grad` and `jax.jacrev`, to any
    order, in `jax.vmap`, `jax.jit`, `lax.scan` and `lax.cond`, in any mixture. Each
    evaluation, derivative or batch is one call over rpc. The backward pass sends
    arguments and cotangents, and the callee keeps nothing in between.

    The function must be pure and is compiled on the callee, once for the same shapes;
    it may make remote calls itself, also back to the caller. When it is new, or its
    arguments have new shapes, the callee is first asked for the shapes of the result.

    Args:
      to: Name, rank or WorkerInfo; it may be this worker itself.
      fn: A function that the callee can find by its name, and allows (see `init_rpc`).
        What a `functools.partial` or a bound method brings counts as arguments.
      *args: Pytrees. Arrays, numbers and PRNG keys are differentiated or batched as
        `fn` itself would; other leaves, such as texts or functions, must be hashable.
        For an RRef to a variable of the callee `fn` gets the variable's tree. Its
        gradient stays there: the backward call adds it to the current context, if there
        is one.
      kwargs: Keyword arguments, likewise. A mapping, as in `rpc_sync`, so that no name
        of an argument is taken.
      timeout: Seconds for each call over rpc; -1 for the default, 0 for no limit.

    Returns:
      What `fn` returns, a pytree of JAX arrays on this worker's device. The cotangent
      of an argument is where the argument is.

    Raises:
      TypeError: `fn` cannot be called or does not return arrays; an argument cannot be
        hashed, is recorded, or refers to something that is no variable. In forward
        mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`): use `jax.jacrev`.
      ValueError: `fn` has no name that others could look up, or returns other shapes
        than when it was traced.
      NotImplementedError: It is inside `jax.checkpoint`, or in a jitted program for
        several devices.
      RpcTimeout, WorkerLost, ForbiddenFunction: As `rpc_sync`.
      Exception: What `fn` raised, as its own type.
      jax.errors.JaxRuntimeError: Inside jit, any error of a call: it has the type, the
        text and the remote traceback in its message. So has the refusal of a call
        that would wait on the last of XLA's threads (docs/remote_call.md).

    A call is made as the worker that is current when it is traced.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import autograd, rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     def loss(x):
      ...         return autograd.remote_call("worker1", jnp.tanh, x).sum()
      ...     gradient = jax.jit(jax.grad(loss))(jnp.array([0.0, 1.0]))
      >>> [round(float(g), 3) for g in gradient]
      [1.0, 0.42]
    """
    function, args, kwargs = _unbound(fn, args, named("remote_call", kwargs))
    if not callable(function) or function.__hash__ is None:
        rule = "must be callable, and hashable"
        raise TypeError(requirement("remote_call(fn)", rule, function))
    check_timeout("remote_call(timeout=...)", timeout)
    agent = current_agent()
    peer = agent.directory.find(to)
    call = "remote_call(*args)"
    arrays, references, structure = taken_apart((args, kwargs), call)
    target = Target(
        caller=agent.info.name,
        to=peer.info.name,
        function=function,
        structure=structure,
        kinds=tuple(map(abstract_of, arrays)),
        timeout=float(timeout),
        references=tuple(map(weakref.ref, references)),
    )
    known = caller_of(agent).known(target)
    return known.structure.tree(bind(target, (), known.kinds, arrays))


def _unbound(
    fn: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[Any, tuple[PyTree, ...], dict[str, PyTree]]:
    """A function with a name, and as arguments what was bound to it."""
    while True:
        if isinstance(fn, functools.partial):
            args, kwargs = fn.args + args, {**fn.keywords, **kwargs}
            fn = fn.func
        elif isinstance(fn, types.MethodType) and not isinstance(fn.__self__, type):
            args = (fn.__self__, *args)
            fn = fn.__func__
        else:
            return fn, args, kwargs
