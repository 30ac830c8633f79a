"""`remote_call`: a call as a primitive of JAX, with a rule for each transformation.

It runs a target after operations. Its rules never look inside the function:

- vmap appends `Vmap`;
- reverse mode appends `Pullback`: the derivative of `remote_call` is a second
  primitive, linear in the tangents, that can only be transposed; its transpose is
  `remote_call` again, on the arguments and cotangents;
- jit has it called back by the compiled program; without jit it is called at once.

A derivative of any order and any mixture with vmap is thus one call.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jdist._compat import beside, device_count_of, is_traced, unrepeatable_effect
from jdist._errors import requirement, type_error
from jdist._tree import PyTree, is_inexact
from jdist.autograd.call_primitive import callback
from jdist.autograd.call_primitive.arguments import (
    AbstractArray,
    abstract_of,
    taken_apart,
)
from jdist.autograd.call_primitive.caller import Call, Target, caller_of, calling
from jdist.autograd.call_primitive.transforms import Pullback, Vmap
from jdist.rpc import WorkerInfo
from jdist.rpc.extension import current, current_agent, named

EFFECT = unrepeatable_effect(
    "autograd.remote_call, which must not be made a second time in the backward pass. "
    "Leave it out of jax.checkpoint: its backward pass keeps only its arguments anyway"
)

LoweredValue = Any
"""A value of the program that JAX is lowering."""

call_p = Primitive("remote_call")
call_p.multiple_results = True
tangent_p = Primitive("remote_call_tangent")
tangent_p.multiple_results = True


def remote_call(
    to: str | int | WorkerInfo,
    fn: Callable[..., PyTree],
    *args: PyTree,
    kwargs: Mapping[str, PyTree] | None = None,
    timeout: float = current.DEFAULT,
) -> PyTree:
    """Computes `fn(*args, **kwargs)` on the worker `to`, transformable by JAX.

    It works in `jax.grad`, `jax.vjp`, `jax.value_and_grad` and `jax.jacrev`, to any
    order, in `jax.vmap`, `jax.jit`, `lax.scan` and `lax.cond`, in any mixture. Each
    evaluation, derivative or batch is one call over rpc. The backward pass sends
    arguments and cotangents, and the callee keeps nothing in between.

    The function must be pure and is compiled on the callee, once for the same shapes;
    it may make remote calls itself, also back to the caller. When it is new, or its
    arguments have new shapes, the callee is first asked for the shapes of the result.

    Args:
      to: Name, rank or WorkerInfo; it may be this worker itself.
      fn: A function that the callee can find by its name, and allows (see `init_rpc`).
        Arguments bound by `functools.partial` or a method count as arguments.
      *args: Pytrees. Arrays, numbers and PRNG keys are differentiated or batched as
        `fn` itself would; other leaves, such as texts or functions, must be hashable.
      kwargs: Keyword arguments, likewise. A mapping, as in `rpc_sync`, so that no name
        of an argument is taken.
      timeout: Seconds for each call over rpc; -1 for the default, 0 for no limit.

    Returns:
      What `fn` returns, a pytree of JAX arrays on this worker's device. The cotangent
      of an argument is where the argument is.

    Raises:
      TypeError: `fn` cannot be called or does not return arrays; an argument cannot be
        hashed, is recorded, or is a reference. In forward
        mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`): use `jax.jacrev`.
      ValueError: `fn` has no name that others could look up, or returns other shapes
        than when it was traced.
      NotImplementedError: It is inside `jax.checkpoint`, or in a jitted program for
        several devices.
      RpcTimeout, WorkerLost, ForbiddenFunction: As `rpc_sync`.
      Exception: What `fn` raised, as its own type.
      jax.errors.JaxRuntimeError: Inside jit, any error of a call: it has the type, the
        text and the remote traceback in its message. So has the refusal of a call
        that would wait on the last of XLA's threads (docs/autograd.md).

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
        rule = "must be a function, and hashable"
        raise type_error("remote_call(fn)", rule, function)
    current.check_timeout("remote_call(timeout=...)", timeout)
    agent = current_agent()
    peer = agent.directory.find(to)
    call = "remote_call(*args)"
    arrays, structure = taken_apart((args, kwargs), call)
    target = Target(
        caller=agent.info.name,
        to=peer.info.name,
        function=function,
        structure=structure,
        kinds=tuple(map(abstract_of, arrays)),
        timeout=float(timeout),
    )
    # Before the primitive is bound: JAX needs the shapes of the results, and only the
    # callee's code determines them.
    known = caller_of(agent).known(target)
    found = call_p.bind(*arrays, call=Call(target, (), known.kinds))
    return known.structure.tree(found)


def _unbound(
    fn: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[Any, tuple[PyTree, ...], dict[str, PyTree]]:
    """Splits bound arguments off a partial function or method."""
    # A function travels by name, and bound arrays must be differentiated or batched
    # like any others.
    while True:
        if isinstance(fn, functools.partial):
            args, kwargs = fn.args + args, {**fn.keywords, **kwargs}
            fn = fn.func
        elif isinstance(fn, types.MethodType) and not isinstance(fn.__self__, type):
            args = (fn.__self__, *args)
            fn = fn.__func__
        else:
            return fn, args, kwargs


# --- without a transformation, and compiled ---


def _run(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    # Constants may be of JAX's own literal classes, which do not travel.
    given = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
    with calling(call.target) as caller:
        return caller.make(call, given, host=False)


def _abstract(kinds: Sequence[AbstractArray]) -> list[ShapedArray]:
    return [ShapedArray(k.shape, k.dtype, weak_type=k.weak) for k in kinds]


def _lower(stage: Any) -> Any:
    def lower(
        context: mlir.LoweringRuleContext, *values: LoweredValue, call: Call
    ) -> LoweredValue:
        # XLA would call back once for each device.
        devices = device_count_of(context)
        if devices > 1:
            rule = "must be in a program for one device: each device would make it"
            remedy = "Call it outside of jit, which gathers sharded arrays."
            raise NotImplementedError(
                requirement(str(call.target), rule, f"a program for {devices}", remedy)
            )

        def staged(*arrays: jax.Array) -> list[jax.Array]:
            return stage(call, arrays)

        return mlir.lower_fun(staged, multiple_results=True)(context, *values)

    return lower


call_p.def_impl(_run)
call_p.def_effectful_abstract_eval(lambda *_, call: (_abstract(call.results), {EFFECT}))
mlir.register_lowering(call_p, _lower(callback.staged_elsewhere))
mlir.register_lowering(call_p, _lower(callback.staged_on_cpu), platform="cpu")


# --- vmap ---


def _batch(
    arrays: Sequence[jax.Array], axes: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    pairs = zip(arrays, axes, strict=True)
    size = next(array.shape[axis] for array, axis in pairs if axis is not None)
    batched = tuple(k._replace(shape=(size, *k.shape)) for k in call.results)
    # One call for the whole batch: the callee maps its function over the new axis.
    operations = (*call.operations, Vmap(tuple(axes)))
    found = call_p.bind(*arrays, call=Call(call.target, operations, batched))
    return found, [0] * len(found)


batching.primitive_batchers[call_p] = _batch


# --- reverse mode ---


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    # The call itself; its derivative is bound beside it and made only if it is
    # transposed.
    values = call_p.bind(*primals, call=call)
    wanted = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    # Integers have no tangent that could be transposed.
    varying = tuple(i for i, k in enumerate(call.results) if is_inexact(k))
    moved = [tangents[i] for i in wanted]
    found = tangent_p.bind(*primals, *moved, call=call, wanted=wanted, varying=varying)
    derivatives = dict(zip(varying, found, strict=True))
    return values, [
        derivatives[i] if i in derivatives else ad.Zero(jax.typeof(x).to_tangent_aval())
        for i, x in enumerate(values)
    ]


def _transpose(
    cotangents: Sequence[Any],
    *arguments: PyTree,
    call: Call,
    wanted: tuple[int, ...],
    varying: tuple[int, ...],
) -> list[jax.Array | None]:
    count = len(arguments) - len(wanted)
    primals = arguments[:count]
    given = zip(varying, cotangents, strict=True)
    # Symbolic zeros are neither sent nor computed with.
    present = [(i, ct) for i, ct in given if type(ct) is not ad.Zero]
    if not present:
        return [None] * len(arguments)
    operation = Pullback(wanted, tuple(i for i, _ in present))
    kinds = tuple(abstract_of(primals[i])._replace(weak=False) for i in wanted)
    arrays = [*primals, *[ct for _, ct in present]]
    again = Call(call.target, (*call.operations, operation), kinds)
    found = call_p.bind(*arrays, call=again)
    pairs = zip(found, (primals[i] for i in wanted), strict=True)
    placed: list[jax.Array | None] = [_beside(*pair) for pair in pairs]
    return [None] * count + placed


def _beside(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
    """Places a cotangent beside its argument."""
    arrays = isinstance(primal, jax.Array) and isinstance(cotangent, jax.Array)
    if not arrays or is_traced(primal) or is_traced(cotangent):
        return cotangent
    return beside(cotangent, primal)


def _refuse_forward_mode(*_: object, call: Call, **__: object) -> NoReturn:
    rule = "must be differentiated in reverse mode"
    remedy = (
        "Use jax.grad, jax.vjp or jax.jacrev in place of jax.jvp, jax.jacfwd and "
        "jax.linearize, and jax.jacrev(jax.jacrev(f)) in place of jax.hessian(f)."
    )
    raise type_error(str(call.target), rule, "forward mode", remedy)


ad.primitive_jvps[call_p] = _differentiate
ad.primitive_transposes[tangent_p] = _transpose
tangent_p.def_abstract_eval(
    lambda *_, call, varying, **__: _abstract([call.results[i] for i in varying])
)
tangent_p.def_impl(_refuse_forward_mode)
ad.primitive_jvps[tangent_p] = _refuse_forward_mode
batching.primitive_batchers[tangent_p] = _refuse_forward_mode
mlir.register_lowering(tangent_p, _refuse_forward_mode)
