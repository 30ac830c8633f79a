"""Values between workers: messages of rpc, sent while the next action computes."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jdist.pipeline.post import Parcel
from jdist.rpc import RpcTimeout, WorkerInfo, WorkerLost
from jdist.rpc.agent import Agent
from jdist.rpc.deadline import DEFAULT
from jdist.rpc.remote_exception import describe, rebuild

CLOCK = "pipeline.clock"
"""Kind of the request that asks what a worker's clock shows."""

_PARCEL, _FAILED = "pipeline.parcel", "pipeline.failed"
Address = tuple[str, int]
"""A pipeline, by its workers and its number among theirs; and the number of a step."""


class Mailbox:
    """What has arrived for the pipelines of one worker.

    Args:
      agent: The worker.
    """

    def __init__(self, agent: Agent) -> None:
        self.changed = threading.Condition()
        self.arrived: dict[Address, dict[Parcel, Any]] = {}
        self.failures: dict[Address, BaseException] = {}
        self.lost: dict[str, str] = {}
        self.done: dict[str, int] = {}
        self._pipelines: Counter[str] = Counter()
        self._functions = agent.codec.functions
        agent.register(_PARCEL, self._receive)
        agent.register(_FAILED, self._fail)
        agent.register(CLOCK, lambda caller, body, meta: time.perf_counter())
        agent.group.on_lost(self._lose)

    def new_pipeline(self, names: Sequence[str]) -> str:
        """Stands for a pipeline on all its workers, if they make them in one order."""
        among = ", ".join(names)
        with self.changed:
            self._pipelines[among] += 1
            return f"pipeline {self._pipelines[among]} of {among}"

    def _receive(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> None:
        pipeline, step, parcel, value = body
        with self.changed:
            if step <= self.done.get(pipeline, -1):
                return  # of a step that failed here
            found = self.arrived.setdefault((pipeline, step), {})
            found[Parcel(*parcel)] = value
            self.changed.notify_all()

    def _fail(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> None:
        pipeline, step, described = body
        self.fail((pipeline, step), rebuild(described, self._functions))

    def fail(self, address: Address, error: BaseException) -> None:
        """A step cannot be finished: whoever waits for it gets the error."""
        with self.changed:
            if address[1] > self.done.get(address[0], -1):
                self.failures.setdefault(address, error)
                self.changed.notify_all()

    def _lose(self, name: str, reason: str) -> None:
        with self.changed:
            self.lost[name] = reason
            self.changed.notify_all()

    def end(self, address: Address) -> None:
        """Forgets a step; what still arrives for it is dropped."""
        with self.changed:
            pipeline, step = address
            self.done[pipeline] = step
            for table in (self.arrived, self.failures):
                for old in [key for key in table if key[0] == pipeline]:
                    if old[1] <= step:
                        del table[old]


_mailboxes: "weakref.WeakKeyDictionary[Agent, Mailbox]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def mailbox_of(agent: Agent) -> Mailbox:
    """The mailbox of a worker, made when first asked for."""
    with _lock:
        found = _mailboxes.get(agent)
        if found is None:
            found = _mailboxes[agent] = Mailbox(agent)
        return found


class WorkerPost:
    """One worker per process (or thread): see `Post`.

    Args:
      agent: This worker.
      names: Of all workers of the pipeline, by rank in it.
      own: This worker's rank in it.
      address: The pipeline and its step.
    """

    def __init__(
        self,
        agent: Agent,
        names: Sequence[str],
        own: int,
        address: Address,
    ) -> None:
        self._agent = agent
        self._names = names
        self._own = own
        self._address = address
        self._timeout = agent.default_timeout
        self._mailbox = mailbox_of(agent)
        device = agent.device or jax.devices()[0]
        self._computes_here = device.platform == "cpu"

    @property
    def _operation(self) -> str:
        return f"step {self._address[1]} of a pipeline"

    def put(self, parcel: Parcel, worker: int, value: Any) -> None:
        """See `Post`.

        On a CPU this thread waits for the value and sends it before the next action
        begins: the core that would compute is the one that would send, so that a value
        sent "meanwhile" would wait for a turn of the scheduler, and the other worker
        with it. Next to an accelerator another thread waits and sends.
        """
        body = (*self._address, tuple(parcel), value)
        if worker == self._own:
            with self._mailbox.changed:
                found = self._mailbox.arrived.setdefault(self._address, {})
                found[parcel] = value
            return
        if self._computes_here:
            self._send(worker, body)
        else:
            self._agent.crew.run(lambda: self._send(worker, body))

    def _send(self, worker: int, body: Any) -> None:
        agent, to = self._agent, self._names[worker]
        try:
            sent = agent.outgoing(to, _PARCEL, body, DEFAULT)
            agent.request(sent._replace(ended=self._ended))
        except BaseException as error:  # noqa: BLE001 - the step's
            self._failed(error)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """A value could not be sent."""
        if isinstance(error, WorkerLost):
            error = WorkerLost(error.worker, self._operation, error.reason)
        self._mailbox.fail(self._address, error)

    def has(self, parcel: Parcel, worker: int) -> bool:
        """See `Post`."""
        return parcel in self._mailbox.arrived.get(self._address, ())

    def take(self, parcel: Parcel, worker: int) -> Any:
        """See `Post`."""
        with self._mailbox.changed:
            return self._mailbox.arrived[self._address].pop(parcel)

    def wait(self, waiting: Mapping[Parcel, str]) -> None:
        """See `Post`.

        Raises:
          WorkerLost: A worker of the pipeline is gone.
          RpcTimeout: Nothing arrived for longer than the timeout.
          Exception: What went wrong on another worker, or with a message.
        """
        until = time.monotonic() + self._timeout if self._timeout else None
        with self._mailbox.changed:
            while not any(self.has(parcel, self._own) for parcel in waiting):
                self._check()
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise RpcTimeout(self._late(waiting))
                self._mailbox.changed.wait(left)

    def _check(self) -> None:
        failure = self._mailbox.failures.get(self._address)
        if failure is not None:
            raise failure
        for name in self._names:
            if name in self._mailbox.lost:
                raise WorkerLost(name, self._operation, self._mailbox.lost[name])

    def _late(self, waiting: Mapping[Parcel, str]) -> str:
        missing = [
            f"{action} for {_KINDS[parcel.kind]} of {self._names[parcel.sender]!r}"
            for parcel, action in waiting.items()
        ]
        shown = "; ".join(dict.fromkeys(missing))
        me = self._names[self._own]
        return (
            f"{me!r} waited more than {self._timeout} s in {self._operation}: {shown}."
        )

    def end(self, error: BaseException | None) -> None:
        """The step is over on this worker; if it failed, the others are told."""
        known = self._mailbox.failures.get(self._address)
        if error is not None and error is not known:
            described = describe(error, self._names[self._own])
            for rank, name in enumerate(self._names):
                if rank != self._own and name not in self._mailbox.lost:
                    self._agent.call_async(name, _FAILED, (*self._address, described))
        self._mailbox.end(self._address)


_KINDS = {"F": "an output", "B": "a cotangent", "G": "the gradient", "L": "the loss"}
_KINDS |= {"S": "the shapes", "N": "the news", "T": "a tied gradient"}
