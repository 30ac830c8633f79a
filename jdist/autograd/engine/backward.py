"""Backward passes over all workers of a context: `backward` and `RRef.backward`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jdist._compat import beside, called_outside_mesh, placed_at
from jdist._errors import check_choice, check_flags, check_type, value_error
from jdist._tree import PyTree
from jdist.autograd.contexts import Container, here, recorded_into
from jdist.autograd.engine import engine as engines
from jdist.autograd.engine import replicated
from jdist.autograd.engine.engine import LocalPass, Root
from jdist.autograd.engine.messages import PassFailure
from jdist.autograd.recording.errors import AutogradError, refused
from jdist.autograd.recording.node import below
from jdist.autograd.recording.recorded import Recorded
from jdist.autograd.recording.variable import LeafNode, Variable
from jdist.rpc import RpcTimeout, RRef, WorkerInfo
from jdist.rpc.extension import current, futures, unpacked

MODES = ("smart", "fast")


@called_outside_mesh
def backward(
    context_id: int,
    roots: Sequence[Recorded],
    mode: str = "smart",
    retain_graph: bool = False,
    timeout: float = current.DEFAULT,
    cotangents: Sequence[ArrayLike] | None = None,
) -> None:
    """Adds the gradients of the roots to the context, on every worker it involves.

    It returns when all gradients have been computed; `get_gradients` returns those of
    this worker's variables. Another pass in the same context adds to them, in the order
    of the calls. Passes of one context may run at the same time, independently; they
    then add in the order in which they finish.
    The order of every sum is fixed by the functions that produce the summands, not by
    arrival, so results repeat bit for bit.

    Args:
      context_id: Id of the context in which the roots were computed.
      roots: Recorded values of this worker. Their sum is differentiated.
      mode: "smart" waits for what the roots depend on. "fast" takes for granted that
        they depend on every message of the context, as torch does; where they do not,
        torch hangs and this raises `UnusedSend`.
      retain_graph: Keeps what the functions need to be run again.
      timeout: Seconds for the pass; -1 for the worker's default, 0 for no limit.
      cotangents: The cotangent of each root, of its shape and dtype. By default ones,
        for roots of one element.

    Raises:
      ContextNotFound: There is no such context, here or on a worker that takes part.
      BackwardError: A function failed, on any worker; `__cause__` is its own error.
      UnusedSend: In FAST mode, a result is not used by the roots.
      WorkerLost: A worker that takes part is gone.
      RpcTimeout: It took longer.
      TypeError, ValueError, AutogradError: The roots are no such values; or what
        `replicated` says, where this worker has replicated variables.

    Whatever is raised, the pass has ended on all workers, or is about to, and later
    passes work. A pass that fails may have added gradients on workers whose part was
    complete.

    Source: `torch.distributed.autograd.backward`; modes after the design note
    "Distributed Autograd Design" of PyTorch.

    Example:
      >>> from jdist import autograd, rpc
      >>> import jax.numpy as jnp
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     w = autograd.variable(jnp.array([3.0, 4.0]))
      ...     with autograd.context() as context_id:
      ...         y = rpc.rpc_sync("worker1", jnp.square, args=(w,))
      ...         loss = autograd.apply(jnp.sum, y)
      ...         autograd.backward(context_id, [loss])
      ...         autograd.get_gradients(context_id)[w]
      Array([6., 8.], dtype=float32)
    """
    container = here()
    run = functools.partial(
        _pass, container, context_id, roots, mode, retain_graph, timeout, cotangents
    )
    if not container.replicated:
        run()
        return
    replicas = replicated.of(container)

    def act() -> None:
        # Gradients count only once all trainers have reduced them. Added before the
        # next pass begins, so that all trainers add in the same order.
        gradients = replicas.reduced(lambda found: run(found).deadline)
        container.retrieve(context_id).accumulate(gradients)

    replicas.lock.releasing(act)


def _pass(
    container: Container,
    context_id: int,
    roots: Sequence[Recorded],
    mode: str,
    retain_graph: bool,
    timeout: float,
    cotangents: Sequence[ArrayLike] | None,
    withheld: dict[Variable, PyTree] | None = None,
) -> LocalPass:
    """Drives a pass to its end on all workers; for its arguments see `backward`."""
    agent, context = container.agent, container.retrieve(context_id)
    check_choice("backward(mode=...)", mode, MODES)
    check_flags("backward", retain_graph=retain_graph)
    # Within a call of another worker its deadline counts too.
    limit = current.resolve(timeout, agent.default_timeout, current.deadline())
    seeds = _roots(roots, cotangents)
    # Each value has the sends below it, on any worker: the marks take no round trip.
    marks = below([root.edge for root in seeds]) if mode == "smart" else None
    engine = engines.of(container)
    local_pass = engine.begin(context, seeds, marks, retain_graph, limit)
    local_pass.withheld = withheld
    try:
        local_pass.drive()
        # Mostly it is over: this thread has brought each of its answers.
        if not local_pass.outcome.done():
            _await(local_pass, context_id, agent.info.name)
    except BaseException as interrupt:
        # Such as Ctrl-C: the result of the pass is then no longer needed.
        told = AutogradError(f"The backward pass was interrupted: {interrupt!r}.")
        local_pass.fail(PassFailure(agent.info.name, told))
        raise
    local_pass.outcome.value()
    return local_pass


def _await(local_pass: LocalPass, context_id: int, worker: str) -> None:
    """Waits for the end of a pass, and ends it at its deadline."""
    done = local_pass.outcome
    if not futures.await_done(done, local_pass.deadline.at):
        waiting = local_pass.waits_for() or "the answers of other workers"
        late = RpcTimeout(
            f"{current.exceeded(local_pass.deadline)} in a backward pass of context "
            f"{context_id}, waiting for {waiting}."
        )
        local_pass.fail(PassFailure(worker, late))
        # Failed here, so that it is done as soon as the step that runs has ended.
        futures.await_done(done, None)


# --- roots ---


def _roots(
    roots: Sequence[Recorded], cotangents: Sequence[ArrayLike] | None
) -> list[Root]:
    """Check the roots and pair them with their cotangents.

    Raises:
      TypeError: The arguments are no sequences.
      AutogradError: There is no root, or one that cannot be differentiated.
      ValueError: A cotangent does not fit its root.
    """
    call = "backward(roots)"
    rule = "must be a list of recorded values (incompatible function arguments)"
    check_type(call, roots, list | tuple, rule)
    if not roots:
        rule = "must have a value: No tensors provided for gradient computation"
        raise refused(call, rule, "none")
    if cotangents is None:
        return [_scalar_root(position, root) for position, root in enumerate(roots)]
    call = "backward(cotangents=...)"
    rule = "must be a list of arrays, one for each root"
    check_type(call, cotangents, list | tuple, rule)
    if len(cotangents) != len(roots):
        rule = f"must be {len(roots)} arrays, one for each root"
        raise value_error(call, rule, cotangents)
    pairs = enumerate(zip(roots, cotangents, strict=True))
    return [_seeded_root(position, root, value) for position, (root, value) in pairs]


def _scalar_root(position: int, root: Recorded) -> Root:
    value = _value_of_root(position, root)
    if value.size != 1:
        rule = (
            f"has roots[{position}] that is not a scalar, all roots need to be scalar"
        )
        remedy = "Give cotangents=, one for each root, or take a sum."
        raise refused("backward(roots)", rule, f"shape {value.shape}", remedy)
    of = value.shape, value.dtype, value.sharding, value.committed
    seed = _one(*of)
    # A gradient may be the seed itself, and its user may have donated it.
    if seed.is_deleted():
        _one.cache_clear()
        seed = _one(*of)
    return Root(root.edge, seed)


# Kept, because to make one takes longer than a small backward pass.
@functools.lru_cache(64)
def _one(
    shape: tuple[int, ...], dtype: np.dtype, place: jax.sharding.Sharding, tied: bool
) -> jax.Array:
    """Makes the cotangent of a scalar root of this kind."""
    return placed_at(np.ones(shape, dtype), place, tied)


def _seeded_root(position: int, root: Recorded, cotangent: ArrayLike) -> Root:
    value = _value_of_root(position, root)
    if isinstance(cotangent, np.ndarray):
        # A copy, which the caller cannot change; `jnp.array` compiles for each shape.
        seed = jax.device_put(np.array(cotangent))
    else:
        seed = jnp.asarray(cotangent)
    shape, dtype = seed.shape, seed.dtype
    if (shape, dtype) != (value.shape, value.dtype):
        call = f"backward(cotangents[{position}])"
        rule = f"must be of its root's shape {value.shape} and dtype {value.dtype}"
        raise value_error(call, rule, f"{shape} and {dtype}")
    # Programs are compiled for the places of their arguments.
    if seed.sharding != value.sharding:
        seed = jax.device_put(seed, value.sharding)
    return Root(root.edge, beside(seed, value))


def _value_of_root(position: int, root: object) -> jax.Array:
    """Return the array of a root, which must have been computed from variables."""
    call = f"backward(roots[{position}])"
    leaf = isinstance(root, Variable) or (
        isinstance(root, Recorded) and isinstance(root.edge.node, LeafNode)
    )
    if leaf:
        rule = "must have been computed: a variable does not have a valid gradient "
        rule += "function"
        raise refused(call, rule, root)
    if not isinstance(root, Recorded):
        rule = "must be a recorded value: requires_grad not set on it"
        remedy = "It does not depend on a variable, or its history was dropped."
        raise refused(call, rule, root, remedy)
    return root.value


REFERENCE = "autograd.reference"


def install(container: Container) -> None:
    """Registers `RRef.backward`, for references on this worker and from it."""

    def answer(caller: WorkerInfo, body: object, meta: dict[str, object]) -> None:
        rule = "A reference, a context and a mode are needed"
        rref, context_id, retain_graph = unpacked(body, tuple[RRef, int, bool], rule)
        backward(context_id, [rref.local_value()], retain_graph=retain_graph)

    container.agent.register(REFERENCE, answer)
    container.agent.extension_state.backward = _backward_of_reference


def _backward_of_reference(
    rref: RRef[Any], context_id: int, retain_graph: bool
) -> None:
    """See `RRef.backward`.

    Raises:
      AutogradError: No context was given, and there is none here.
      Exception: As `jdist.autograd.backward`.
    """
    container = here()
    if context_id == -1:
        context = recorded_into(container)
        if context is None:
            rule = "must be the id of a context, outside of one"
            remedy = "Gradients are kept in contexts, and never with a variable."
            raise refused("RRef.backward(context_id)", rule, context_id, remedy)
        context_id = context.id
    if rref.is_owner():
        backward(context_id, [rref.local_value()], retain_graph=retain_graph)
    else:
        body = (rref, context_id, bool(retain_graph))
        container.agent.call(rref.owner(), REFERENCE, body)
