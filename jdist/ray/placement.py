"""A Ray placement group with one actor for each worker, and their replacement."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from jdist import rpc
from jdist._errors import (
    Unavailable,
    check_choice,
    check_flags,
    check_function,
    check_number,
    check_positive_seconds,
    check_type,
    extra,
    listed,
    value_error,
)
from jdist.ray.worker_actor import WorkerActor, is_preparing
from jdist.rpc.extension import (
    Rendezvous,
    ReservedPort,
    current_agent,
    main_module,
)

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_ENDING_SECONDS = 10.0
_LOOK_SECONDS = 0.05
# Between attempts to replace a worker. Together they are longer than the silence after
# which the group gives a worker up.
_PAUSES = (0.5, 1.5, 5.0, 10.0)


@contextlib.contextmanager
def cluster(  # noqa: PLR0913 - options, by keyword
    names: Iterable[str],
    *,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    replace: bool = False,
    joined: Callable[[rpc.WorkerInfo], object] | None = None,
    driver: str = "driver",
    allow: Iterable[str] = (),
    options: rpc.RpcOptions | None = None,
    timeout: float = 300.0,
) -> Iterator[PlacedWorkers]:
    """Starts workers in actors that Ray places; this process is the worker of rank 0.

    Each worker is a process of its own, with the resources requested and the
    environment variables of `python -m jdist.launch`. Ray starts it and detects its
    end; calls, references, gradients and pipelines use jdist's own connections, which
    are encrypted between machines. If a worker or its machine dies, every call to it
    raises `WorkerLost` with its name.

    At the end of the block all workers shut down, gracefully or, if the block raised an
    exception, at once; then their processes are killed. If Ray is not initialized in
    this process, it is initialized for the block.

    Args:
      names: Names of the workers, which get the ranks 1, 2, ... in this order.
      resources: Resources of each worker, in Ray's names: `{"CPU": 4, "GPU": 1}`,
        `{"TPU": 4}`; by default one CPU. Memory is in bytes.
      strategy: How Ray spreads them over machines: "PACK", "SPREAD", "STRICT_PACK" or
        "STRICT_SPREAD".
      replace: Start another process for each that ends before the block does, with the
        same name, rank and resources, as soon as Ray has room for it. The group is then
        elastic: it has no `rpc.barrier` of a fixed size, and a new process knows
        nothing of the values that its predecessor had.
      joined: Called in this process with every worker that has joined: the first
        workers before the block begins, replacements from a thread. It must not wait
        for work of the worker; start that by `rpc.rpc_async`.
      driver: The name of this process as a worker.
      allow: As for `rpc.init_rpc`.
      options: Options of all workers; without `host` and `device`, which belong to one.
      timeout: Seconds until Ray has placed all workers and their processes have
        started.

    Yields:
      The workers.

    Raises:
      Unavailable: Ray is not installed, or has no room for the workers in time.
      RuntimeError: Called while an actor imports this program's main module.
      RpcError: This process is a worker already; the group did not form; at the end, a
        replacement failed.
      WorkerLost: At the end, unless `replace` is true: a worker was lost.
      TypeError: An argument is of another type.
      ValueError: Names are not unique or missing; another argument is out of range.

    Source: Ray's placement groups and actors.
    """
    wanted = _checked_names(names, driver)
    bundle = _checked_resources(resources)
    _check_run(strategy, replace, joined, timeout)
    options = _checked_options(options)
    ray = _ray()
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(log_to_driver=True)
            stack.callback(ray.shutdown)
        until = time.monotonic() + timeout
        group = _placed(ray, bundle, len(wanted), strategy, until, stack)
        address = str(ray.util.get_node_ip_address())
        port, jax_port = (
            stack.enter_context(ReservedPort(host=address)).port for _ in range(2)
        )
        size = len(wanted) + 1
        key = str(options.key or rpc.new_cluster_key())
        terms = _Terms(
            ray=ray,
            group=group,
            bundle=bundle,
            world_size=0 if replace else size,
            allow=tuple(allow),
            options=dataclasses.replace(options, key=key),
            joined=joined or (lambda info: None),
            main=main_module(),
        )
        # Ray shows each worker its own devices only, as if each had its own machine.
        meeting = Rendezvous(
            nprocs=1,
            nnodes=size,
            address=address,
            port=port,
            jax_port=jax_port,
            key=key,
        )
        infos = [rpc.WorkerInfo(name, rank) for rank, name in enumerate(wanted, 1)]
        workers = PlacedWorkers(terms, [_PlacedWorker(each, meeting) for each in infos])
        # Last on the stack, so first to run: processes end before their group.
        stack.callback(workers._end)
        workers._start(driver, (address, port), until)
        graceful = False
        try:
            yield workers
            graceful = True
        finally:
            workers._leave(graceful)
        workers.check()


def _check_run(
    strategy: object, replace: object, joined: object, timeout: object
) -> None:
    check_choice("cluster(strategy=...)", strategy, _STRATEGIES)
    check_flags("cluster", replace=replace)
    if joined is not None:
        check_function("cluster(joined=...)", joined)
    check_positive_seconds("cluster(timeout=...)", timeout)
    if is_preparing():
        raise RuntimeError(
            "`jdist.ray.cluster` was called while an actor imported the main module. "
            'Guard the start of the program by `if __name__ == "__main__":`.'
        )


class PlacedWorkers:
    """The workers that Ray placed; made by `cluster`.

    Attributes:
      infos: Names and ranks of the workers, in the order of the names.
    """

    def __init__(self, terms: _Terms, placed: Iterable[_PlacedWorker]) -> None:
        self._terms = terms
        self._placed = list(placed)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.infos = tuple(each.info for each in self._placed)

    def nodes(self) -> dict[str, str]:
        """The id of the machine that each worker is on, in Ray's hexadecimal form.

        A worker that was lost is missing until it has been replaced.
        """
        with self._lock:
            lost = self._missing()
            here = [each for each in self._placed if each.info.name not in lost]
            return {each.info.name: each.node for each in here}

    def check(self) -> None:
        """Raises the error that kept a worker from being replaced.

        Raises:
          RpcError: A replacement could not join, or `joined` raised; its cause says
            why.
        """
        if self._failure is not None:
            raise rpc.RpcError(f"{self._failure}") from self._failure.__cause__

    def wait(self, timeout: float = 60.0) -> None:
        """Waits until every worker answers, lost workers having been replaced.

        Args:
          timeout: Seconds.

        Raises:
          RpcTimeout: Some are missing; the message names them.
          RpcError: As `check`.
        """
        until, pause = time.monotonic() + timeout, threading.Event()
        while True:
            self.check()
            # A call may know of a loss before Ray and the group do.
            missing = self._missing() or self._silent(until)
            if not missing:
                return
            if time.monotonic() >= until:
                break
            pause.wait(_LOOK_SECONDS)
        remedy = (
            "`cluster(replace=True)` replaces workers."
            if self._terms.world_size
            else "Has the cluster room for what a worker needs, "
            f"{dict(self._terms.bundle)}?"
        )
        raise rpc.RpcTimeout(
            f"{', '.join(missing)} had not been replaced within {timeout} s. {remedy}"
        )

    def _silent(self, until: float) -> list[str]:
        """The workers that do not answer."""
        left = max(_LOOK_SECONDS, until - time.monotonic())
        asked = {
            # Any function that every worker allows.
            info.name: rpc.rpc_async(info.name, max, args=(0, 1), timeout=left)
            for info in self.infos
        }
        found = []
        for name, answer in asked.items():
            try:
                answer.wait()
            except (rpc.WorkerLost, rpc.RpcTimeout):
                found.append(name)
        return found

    def _missing(self) -> list[str]:
        # The group may know of a loss before Ray does, or after it.
        group = current_agent().group
        names = {info.name for info in group.workers()}
        known = names if group.elastic else names - group.lost().keys()
        return [
            each.info.name
            for each in self._placed
            if not each.present or each.info.name not in known
        ]

    def _start(self, driver: str, at: tuple[str, int], until: float) -> None:
        """Starts all processes, which form one group with this one."""
        ray, terms = self._terms.ray, self._terms
        # All are requested before any is awaited, so that Ray starts them in parallel.
        for each in self._placed:
            each.create(terms)
        ready = [each.actor.ready.remote() for each in self._placed]
        try:
            ray.get(ready, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            told = ray.wait(ready, num_returns=len(ready), timeout=0)[1]
            late = [w.info.name for w, r in zip(self._placed, ready, strict=True)
                    if r in told]  # fmt: skip
            raise Unavailable(
                f"Ray had not started {', '.join(late)} in time. Raise "
                "`cluster(timeout=...)`, or look at Ray's logs."
            ) from None
        # Requested first: `init_rpc` below returns when all workers have joined.
        joins = [each.join(terms) for each in self._placed]
        try:
            rpc.init_rpc(
                driver,
                rank=0,
                world_size=terms.world_size,
                coordinator=at,
                allow=terms.allow,
                options=terms.options,
            )
        except rpc.RpcError:
            # The error of a worker that could not join says more.
            ray.get(ray.wait(joins, num_returns=len(joins), timeout=0)[0])
            raise
        ray.get(joins)
        for each in self._placed:
            each.joined(terms)
            terms.joined(each.info)
            thread = threading.Thread(
                target=self._keep, args=(each,), name=f"jdist-ray-{each.info.name}"
            )
            self._threads.append(thread)
            thread.start()

    def _keep(self, worker: _PlacedWorker) -> None:
        """Replaces one worker each time it ends."""
        terms = self._terms
        while True:
            # `watch` never returns, so it is done when the process has ended for any
            # reason.
            terms.ray.wait([worker.watched])
            with self._lock:
                worker.present = False
                # Under the lock: `_end` must not miss an actor that is created now.
                if self._closing.is_set() or terms.world_size:
                    return
                worker.create(terms)
            try:
                self._rejoin(worker)
                if worker.present:
                    terms.joined(worker.info)
            except Exception as error:  # noqa: BLE001 - raised by `check`
                with self._lock:
                    if not self._closing.is_set():
                        what = f"{worker.info.name} could not be replaced: {error}"
                        self._failure = rpc.RpcError(what)
                        self._failure.__cause__ = error
                return

    def _rejoin(self, worker: _PlacedWorker) -> None:
        """Waits until a new process has joined; starts another one if it could not."""
        terms = self._terms
        pause = threading.Event()
        for seconds in (*_PAUSES, None):
            try:
                terms.ray.get(worker.actor.ready.remote())
                terms.ray.get(worker.join(terms))
                break
            # Ray may have chosen a dead machine that still counts as alive; or the
            # group still has the predecessor, whose end Ray noticed first.
            except (terms.ray.exceptions.RayActorError, rpc.RpcError):
                if seconds is None or self._closing.is_set():
                    raise
            pause.wait(seconds)
            with self._lock:
                if self._closing.is_set():
                    return
                terms.ray.kill(worker.actor)
                worker.create(terms)
        with self._lock:
            worker.joined(terms)

    def _leave(self, graceful: bool) -> None:
        """Shuts rpc down in all processes."""
        with self._lock:
            self._closing.set()
            present = [each for each in self._placed if each.present]
            # All at once: a graceful shutdown of one waits for the others.
            leaving = [each.actor.leave.remote(graceful) for each in present]
        try:
            rpc.shutdown(graceful)
        finally:
            if graceful and leaving:
                ray = self._terms.ray
                ray.wait(leaving, num_returns=len(leaving), timeout=_ENDING_SECONDS)

    def _end(self) -> None:
        """Kills all processes and waits until they have ended."""
        ray = self._terms.ray
        with self._lock:
            self._closing.set()
            for each in self._placed:
                if each.actor is not None:
                    ray.kill(each.actor)
            watched = [each.watched for each in self._placed if each.actor is not None]
        if watched:
            ray.wait(watched, num_returns=len(watched), timeout=_ENDING_SECONDS)
        for thread in self._threads:
            thread.join(_ENDING_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Terms:
    """Settings that all workers of a cluster share; `ray` is the module."""

    ray: ModuleType
    group: Any
    bundle: Mapping[str, float]
    # 0 for an elastic group, which replacements can join later.
    world_size: int
    allow: tuple[str, ...]
    # The key is in them.
    options: rpc.RpcOptions = dataclasses.field(repr=False)
    joined: Callable[[rpc.WorkerInfo], object]
    main: Mapping[str, str]


class _PlacedWorker:
    """One worker, which may move to another process.

    Attributes:
      info: Name and rank of the worker.
      actor: Ray's handle of the worker's process; None before the first one.
      watched: A Ray reference that is done when the process has ended.
      present: Whether the worker belongs to the group, as far as Ray knows.
      node: Ray's id of the worker's machine.
    """

    def __init__(self, info: rpc.WorkerInfo, meeting: Rendezvous) -> None:
        self.info = info
        own = dataclasses.replace(meeting, node_rank=info.id)
        self._variables = own.variables(0)
        self.actor: Any = None
        self.watched: Any = None
        self.present = False
        self.node = ""

    def create(self, terms: _Terms) -> None:
        """Requests a process from Ray."""
        needs = dict(terms.bundle)
        scheduling = terms.ray.util.scheduling_strategies
        place = scheduling.PlacementGroupSchedulingStrategy(
            placement_group=terms.group,
            placement_group_bundle_index=self.info.id - 1,
        )
        memory = {"memory": needs.pop("memory")} if "memory" in needs else {}
        actor = terms.ray.remote(WorkerActor).options(
            name=None,
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            resources=needs,
            scheduling_strategy=place,
            # `watch` occupies one thread for good.
            max_concurrency=2,
            # A process that Ray restarted itself would not join the group.
            max_restarts=0,
            **memory,
        )
        self.actor = actor.remote(self._variables, terms.main)
        self.watched = self.actor.watch.remote()

    def join(self, terms: _Terms) -> Any:
        """Lets the process join; returns a Ray reference that is done when it has."""
        return self.actor.join.remote(
            self.info.name, terms.world_size, terms.allow, terms.options
        )

    def joined(self, terms: _Terms) -> None:
        """Marks the worker as a member of the group, and notes its machine."""
        self.present = True
        table = terms.ray.util.placement_group_table(terms.group)
        self.node = table["bundles_to_node_id"][self.info.id - 1]


def _ray() -> ModuleType:
    try:
        found = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ModuleNotFoundError as error:
        # A module that an installed Ray lacks is another error.
        if (error.name or "").partition(".")[0] != "ray":
            raise
        what = f"`jdist.ray.cluster` needs Ray: {extra('ray')}"
        raise Unavailable(what) from None
    return found


def _placed(
    ray: ModuleType,
    bundle: Mapping[str, float],
    count: int,
    strategy: str,
    until: float,
    stack: contextlib.ExitStack,
) -> Any:
    """Returns a placement group that Ray has placed; the stack removes it."""
    group = ray.util.placement_group([dict(bundle)] * count, strategy=strategy)
    stack.callback(ray.util.remove_placement_group, group)
    if not group.wait(max(0.0, until - time.monotonic())):
        there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        raise Unavailable(
            f"Ray has no room for {count} workers of {dict(bundle)} by {strategy}. Its "
            f"machines have {there}, less what others use."
        )
    return group


def _checked_names(names: Iterable[str], driver: str) -> list[str]:
    rule = f"must be one or more unique names, none of them {driver!r}"
    found = listed("cluster(names)", names, str, rule)
    if not found or len({*found, driver}) != len(found) + 1:
        raise value_error("cluster(names)", rule, found)
    return found


def _checked_resources(resources: Mapping[str, float] | None) -> dict[str, float]:
    if resources is not None:
        rule = "must be a mapping from Ray's names to amounts"
        check_type("cluster(resources=...)", resources, Mapping, rule)
    found = {"CPU": 1.0} if resources is None else dict(resources)
    for name, amount in found.items():
        argument, rule = f"cluster(resources={{{name!r}: ...}})", "must be an amount"
        check_number(argument, amount, rule, lambda n: True)
    if not found or not all(0 < each < math.inf for each in found.values()):
        rule = "must have a positive amount of one resource or more"
        raise value_error("cluster(resources=...)", rule, found)
    return found


def _checked_options(options: rpc.RpcOptions | None) -> rpc.RpcOptions:
    found = rpc.RpcOptions() if options is None else options
    check_type("cluster(options=...)", found, rpc.RpcOptions, "must be an RpcOptions")
    for name in ("host", "device"):
        if (given := getattr(found, name)) is not None:
            rule = f"must have no {name}, which belongs to one worker"
            raise value_error("cluster(options=...)", rule, given)
    if isinstance(found.key, bytes):
        rule = "must have a key that is text: it is an environment variable too"
        raise value_error("cluster(options=...)", rule, "bytes")
    return found
