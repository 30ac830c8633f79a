"""`backward`: from roots to the gradients of all variables, on all workers."""

from collections.abc import Sequence
from typing import Any

from jdist._errors import requirement
from jdist.autograd.context import container as containers
from jdist.autograd.context.context import Context
from jdist.autograd.context.gradients import accumulate
from jdist.autograd.engine import engine as engines
from jdist.autograd.engine.failure import PassFailure
from jdist.autograd.engine.local_pass import LocalPass, Root
from jdist.autograd.engine.marking import mark
from jdist.autograd.engine.replicated import ReplicaReduction
from jdist.autograd.engine.roots import roots_of
from jdist.autograd.errors import AutogradError
from jdist.autograd.graph.recorded import Recorded
from jdist.autograd.graph.variable import Variable
from jdist.rpc import RpcTimeout
from jdist.rpc.extension import (
    DEFAULT,
    Deadline,
    await_done,
    current,
    current_agent,
    exceeded,
    releasing_all,
    resolve,
)

MODES = ("smart", "fast")


def backward(
    context_id: int,
    roots: Sequence[Recorded],
    mode: str = "smart",
    retain_graph: bool = False,
    timeout: float = DEFAULT,
    cotangents: Sequence[Any] | None = None,
) -> None:
    """Adds the gradients of the roots to the context, on every worker it involves.

    It returns when all of them have been computed; `get_gradients` has those of this
    worker's variables. Another pass in the same context adds to them, in the order of
    the calls. Passes of one context may run at the same time, each by itself; the order
    in which they add is then that in which they finish.

    Every sum has a fixed order, by the functions that the summands come from and never
    by arrival, so results repeat bit for bit.

    Args:
      context_id: Of the context in which the roots were computed.
      roots: Recorded values of this worker. Their sum is differentiated.
      mode: "smart" waits for what the roots depend on. "fast" takes for granted that
        they depend on every message of the context, as torch does; where they do not,
        torch hangs and this raises `UnusedSend`.
      retain_graph: Keeps what the functions need to be run again.
      timeout: Seconds for the pass; -1 for the worker's default, 0 for no limit.
      cotangents: What each root begins with, of its shape and dtype. By default ones,
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
    agent = current_agent()
    reduction = ReplicaReduction(agent)

    def act() -> tuple[Context, dict[Variable, Any]]:
        with reduction:
            context = containers.here().retrieve(context_id)
            if mode not in MODES:
                rule = "must be 'smart' or 'fast'"
                raise ValueError(requirement("backward(mode=...)", rule, mode))
            limit = resolve(timeout, agent.default_timeout, current.deadline())
            seeds = roots_of(roots, cotangents)
            part = _begin(context, seeds, mode, retain_graph, limit)
            part.withheld = reduction.found
            _run(part, context, agent.info.name)
            return context, reduction.reduced(limit)

    context, gradients = releasing_all(reduction.turns, act)
    if gradients:
        accumulate(context, gradients)


def _run(part: LocalPass, context: Context, worker: str) -> None:
    """The pass, to its end on all workers."""
    try:
        part.drive()
        _wait(part, context, worker)
    except BaseException as interrupt:
        # Such as Ctrl-C: nobody waits for the pass any more.
        told = AutogradError(f"The backward pass was interrupted: {interrupt!r}.")
        part.fail(PassFailure(worker, told))
        raise
    part.done.value()


def debug_info() -> dict[str, int]:
    """How many passes and contexts this worker has now.

    Returns:
      `num_current_backward_passes`, those that it takes part in, and
      `num_autograd_contexts`. `rpc.debug_info` has both too.

    Source: `torch.distributed.autograd._get_debug_info`.
    """
    return engines.of(containers.here()).counts()


def backward_of(
    context: Context, root: Recorded, retain_graph: bool, deadline: Deadline
) -> LocalPass:
    """A SMART pass from one value, without a thread that waits: see `Part.done`."""
    part = _begin(context, roots_of([root], None), "smart", retain_graph, deadline)
    part.begin()
    return part


def _begin(
    context: Context,
    seeds: list[Root],
    mode: str,
    retain_graph: bool,
    deadline: Deadline,
) -> LocalPass:
    marks = None
    if mode == "smart":
        starts = [seed.edge.node for seed in seeds]
        seconds = deadline.remaining()
        patience = 0 if seconds is None else seconds
        marks = mark(context.container, context.id, starts, patience)
    engine = engines.of(context.container)
    return engine.begin(context, seeds, marks, retain_graph, deadline)


def _wait(part: LocalPass, context: Context, worker: str) -> None:
    """Until the pass is over; its deadline ends it."""
    if await_done(part.done, part.deadline.at):
        return
    waiting = part.waits_for() or "the answers of other workers"
    late = RpcTimeout(
        f"{exceeded(part.deadline)} in a backward pass of context {context.id}, "
        f"waiting for {waiting}."
    )
    part.fail(PassFailure(worker, late))
    await_done(part.done, None)
