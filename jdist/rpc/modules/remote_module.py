"""Modules that live on a worker and are used from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdist._errors import check_flags, type_error
from jdist.rpc.base.current import DEFAULT
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls import function_calls
from jdist.rpc.calls.agent import current_agent
from jdist.rpc.calls.function_calls import is_asynchronous, named, positional
from jdist.rpc.modules import parameters
from jdist.rpc.rref import Proxy, RRef


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class RemoteModule:
    """A module, or any other object, that lives on a worker and is called like here.

    The constructor makes it there: it exists when this returns. `module(x)` calls it
    and waits; `module.rpc_sync(timeout=...)`, `rpc_async` and `remote` call it, or its
    methods, as the proxies of `RRef` do. It can be sent in calls and returned from
    them: it travels as its reference.

    Arguments that cannot travel, such as `nnx.Rngs`, are made by the factory. JAX
    arrays that the factory makes are on the worker's device, unless it places them
    itself. The object lives as long as a reference to it or to one of its parameters
    does.

    Args:
      to: Name, rank or WorkerInfo; it may be this worker itself.
      factory: A function or class that returns the object.
      args: Its positional arguments, in a tuple or a list.
      kwargs: Its keyword arguments, by their names.
      timeout: Seconds for making it; -1 for the default, 0 for no limit.
      trainable: Whether calls within a context of `jdist.autograd` are recorded there,
        as of an `autograd.TrainableModule`: the parameters of the Flax NNX module that
        the factory returns become variables, and its statistics and random streams
        continue from call to call.

    Attributes:
      module_rref: The reference to the module.

    Raises:
      TypeError, ValueError, ForbiddenFunction: The call itself is wrong; or what is to
        be trainable is no Flax NNX module.
      RpcError: It is to be trainable, and `jdist.autograd` has not been imported.
      RpcTimeout, WorkerLost: As `rpc_sync`.
      Exception: What the factory raised, as its own type.

    Source: `torch.distributed.nn.RemoteModule`. There `forward(x)` and
    `forward_async(x)` are what `module(x)` and `module.rpc_async()(x)` are here, and
    `get_module_rref` is `module_rref`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     words = rpc.RemoteModule("worker1", list, args=(("b", "a"),))
      ...     words.rpc_sync().sort()
      ...     words.rpc_async(timeout=2.0).index("b").wait()
      1
    """

    module_rref: RRef[Any]

    def __init__(
        self,
        to: str | int | WorkerInfo,
        factory: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = DEFAULT,
        *,
        trainable: bool = False,
    ) -> None:
        # An asynchronous factory would return a future of the module, and the reference
        # would be to that.
        if not callable(factory) or is_asynchronous(factory):
            rule = "must be a function or class that returns the module, not a future"
            raise type_error("RemoteModule(factory)", rule, factory)
        call = "RemoteModule"
        check_flags(call, trainable=trainable)
        making = (factory, positional(call, args), named(call, kwargs))
        state = current_agent().extension_state
        make = state.make_trainable if trainable else parameters.make_module
        if make is None:
            what = "`RemoteModule(trainable=True)` is a part of jdist.autograd."
            raise RpcError(f"{what} Import it where the module is used.")
        made = function_calls.rpc_sync(to, make, making, timeout=timeout)
        object.__setattr__(self, "module_rref", made)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, and returns what it returns.

        Raises:
          RpcTimeout, WorkerLost: As `rpc_sync`.
          Exception: What the module raised, as its own type.
        """
        return self.rpc_sync()(*args, **kwargs)

    def rpc_sync(self, timeout: float = DEFAULT) -> Proxy:
        """Calls the module, `module.rpc_sync(2.0)(x)`, or one of its methods."""
        return self.module_rref.rpc_sync(timeout)

    def rpc_async(self, timeout: float = DEFAULT) -> Proxy:
        """As `rpc_sync`, but each call returns a Future of the result."""
        return self.module_rref.rpc_async(timeout)

    def remote(self, timeout: float = DEFAULT) -> Proxy:
        """As `rpc_sync`, but each call returns an RRef of the result, on the owner."""
        return self.module_rref.remote(timeout)

    def parameters(
        self, recurse: bool = True, timeout: float = DEFAULT
    ) -> dict[str, RRef[Any]]:
        """Returns references to the module's parameters, by path.

        Each refers to a *cell* on the owner with the attribute `value`, so that an
        optimizer there can replace the value and the module computes with the new one.
        For a trainable module the cells are variables of `jdist.autograd`, for another
        Flax NNX module of the class `Parameter`, one for each `nnx.Param`; a parameter
        that several layers share is listed once. Any other object has a method
        `parameters()` that returns its cells by their names.

        Args:
          recurse: Whether those of submodules are listed too.
          timeout: Seconds; -1 for the default, 0 for no limit.

        Raises:
          TypeError: The object has no parameters.
          ForbiddenFunction: Its method `parameters` is in a module not allowed.
        """
        rref = self.module_rref
        # The owner lists them: only it has the module, and each reference that it
        # returns keeps the module's parameter alive there.
        call = (parameters.listed, (rref, recurse))
        return function_calls.rpc_sync(rref.owner(), *call, timeout=timeout)

    def remote_parameters(
        self, recurse: bool = True, timeout: float = DEFAULT
    ) -> list[RRef[Any]]:
        """The references that `parameters` returns, in the order of the paths.

        Those of a trainable module are what `autograd.DistributedOptimizer` takes.

        Source: `torch.distributed.nn.RemoteModule.remote_parameters`.
        """
        return list(self.parameters(recurse, timeout).values())

    def train(self, mode: bool = True) -> RemoteModule:
        """Calls the module's own `train()` on its owner and returns this object.

        Args:
          mode: False for evaluation.
        """
        if not mode:
            return self.eval()
        self.rpc_sync().train()
        return self

    def eval(self) -> RemoteModule:
        """Calls the module's own `eval()` on its owner and returns this object."""
        self.rpc_sync().eval()
        return self

    def __repr__(self) -> str:
        return f"RemoteModule({self.module_rref})"
