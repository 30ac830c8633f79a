"""At-least-once delivery with deduplication and backoff: each message is handled once.

Messages of one kind to one worker travel in numbered batches. A batch is sent until it
is answered, with growing pauses, as long as its receiver belongs to the group. A
receiver that has handled a batch before answers it with the answers that it gave then.
Batches arrive in any order.
"""

import contextvars
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jdist.rpc.base.current import Meta
from jdist.rpc.base.dedup_window import DedupWindow, Unsettled
from jdist.rpc.base.errors import ProtocolError, RpcTimeout, WorkerLost
from jdist.rpc.base.future import Future, call_when_done
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec.codes import unpacked

Answers = Sequence[Any] | Future[Sequence[Any]]
"""One answer for each message of a batch, or a future of them."""

Handler = Callable[
    [WorkerInfo, Sequence[Any]], tuple[Answers, Callable[[], None] | None]
]

GATHERING = 0.01
"""Seconds for which a message that can wait does so, for more to the same worker."""

_BODY = tuple[int, int, list[Any]]
_MALFORMED = "A batch has a number, a low-water mark and messages"
_LARGEST_BATCH = 1000
_FIRST_PATIENCE = 1.0
_LONGEST_PATIENCE = 30.0
_FIRST_PAUSE = 0.01

_log = logging.getLogger("jdist.rpc")


class QueuedMessage(NamedTuple):
    """A message and its callbacks.

    Attributes:
      kind: Kind of the message, for which the receiver has a handler.
      row: The message, encodable.
      answered: Called with the answer.
      unreachable: Called instead when there will be none: the receiver is gone or has
        refused the message, or this worker was closed.
    """

    kind: str
    row: Any
    answered: Callable[[Any], None] | None = None
    unreachable: Callable[[], None] | None = None


class _Batch(NamedTuple):
    """Messages of one kind to one worker, sent together."""

    to: int
    number: int
    kind: str
    messages: Sequence[QueuedMessage]


class ReliableDelivery:
    """The messages of one worker to all others, and from them.

    Args:
      agent: The worker.

    Attributes:
      patience: Seconds to wait for the first answer to a batch; then twice as long each
        time.
    """

    def __init__(self, agent: Agent) -> None:
        self.patience = _FIRST_PATIENCE
        self._agent = agent
        self._lock = threading.Lock()
        self._outboxes: defaultdict[int, _Outbox] = defaultdict(_Outbox)
        self._inboxes: defaultdict[int, _Inbox] = defaultdict(_Inbox)

    def handle(
        self,
        kind: str,
        unpack: Callable[[Any], Any],
        handler: Handler,
        inline: bool = False,
    ) -> None:
        """Registers the handler of messages of one kind.

        Args:
          kind: Kind of the messages.
          unpack: Makes a message of a row that arrived, or raises ProtocolError.
          handler: `handler(sender, messages)` takes a batch in. It returns the answers,
            and a function that is called once these are noted, or None: all that may
            block.
          inline: Whether `unpack` and `handler` never wait; see `Agent.register`.
        """

        def read(sender: WorkerInfo, body: Any, meta: Meta) -> Any:
            number, low_water_mark, rows = unpacked(body, _BODY, _MALFORMED)
            messages = [unpack(row) for row in rows]
            with self._lock:
                inbox = self._inboxes[incarnation_of(sender)]
            with inbox.lock:
                # A repetition gets the first answers, which the sender may have missed.
                if not inbox.window.take(number, low_water_mark):
                    return _answer(inbox.answers.get(number, [None] * len(messages)))
                inbox.prune(low_water_mark)
                answers, react = handler(sender, messages)
                inbox.answers[number] = answers
            # Outside of the lock: it may block, and a repetition must not.
            if react is not None and inline:
                self._agent.pool.run(react)
            elif react is not None:
                react()
            return _answer(answers)

        self._agent.register(kind, read, inline=inline)

    def send(
        self,
        to: int,
        kind: str,
        row: Any,
        answered: Callable[[Any], None] | None = None,
        unreachable: Callable[[], None] | None = None,
        *,
        gather: bool = False,
    ) -> None:
        """Delivers one message; see `QueuedMessage` and `send_all`."""
        message = QueuedMessage(kind, row, answered, unreachable)
        self.send_all(to, [message], gather)

    def send_all(
        self, to: int, messages: Sequence[QueuedMessage], gather: bool = False
    ) -> None:
        """Delivers messages to one worker; returns at once, on any thread.

        Args:
          to: Incarnation of the receiver.
          messages: In no particular order.
          gather: Whether they may wait a moment for more to the same worker.
        """
        with self._lock:
            outbox = self._outboxes[to]
            if gather and not outbox.waiting:
                # Before they are noted: after an interrupt in between, later messages
                # must not count on an appointment that was never made.
                self._agent.timer.later(GATHERING, lambda: self._empty(to, outbox))
            outbox.waiting += messages
            if gather or outbox.sending:
                return
        self._agent.pool.run(lambda: self._empty(to, outbox))

    def idle(self) -> bool:
        """Whether every message was answered."""
        with self._lock:
            boxes = self._outboxes.values()
            return not any(box.waiting or box.batches for box in boxes)

    def forget(self, worker: int) -> None:
        """Abandons messages to a worker that is gone."""
        with self._lock:
            outbox = self._outboxes.pop(worker, None)
            self._inboxes.pop(worker, None)
            left = [] if outbox is None else outbox.clear()
        _abandon(left)

    def close(self) -> None:
        """Abandons messages to all workers."""
        # Abandoned outside of the lock: callbacks may send again.
        with self._lock:
            left = [one for box in self._outboxes.values() for one in box.clear()]
            self._outboxes.clear()
        _abandon(left)

    # --- sending ---

    def _empty(self, to: int, outbox: "_Outbox") -> None:
        with self._lock:
            if outbox.sending:
                return
            # Here, on a thread that no interrupt reaches, and not by the sender.
            outbox.sending = True
        while True:
            with self._lock:
                if not outbox.waiting:
                    outbox.sending = False
                    return
                batches = outbox.take(to)
            for batch in batches:
                self._try(batch, 0)

    def _try(self, batch: _Batch, attempt: int) -> None:
        with self._lock:
            outbox = self._outboxes.get(batch.to)
            if outbox is None or batch.number not in outbox.batches:
                return
            low_water_mark = outbox.batches.low_water_mark
        rows = [message.row for message in batch.messages]
        body = (batch.number, low_water_mark, rows)
        patience = min(_LONGEST_PATIENCE, self.patience * 2**attempt)
        receiver = self._agent.directory.of_incarnation(batch.to)
        if receiver is None or receiver.departed is not None:
            self._end(batch)
            return
        # Outside of any call that is served here: its deadline is not this one's.
        context = contextvars.Context()
        ask = self._agent.call_async
        try:
            sent = context.run(ask, receiver.info, batch.kind, body, patience)
        except Exception as error:  # noqa: BLE001 - handled as one that comes later
            sent = Future()
            sent.set_exception(error)
        call_when_done(sent, lambda: self._tried(batch, attempt, sent))

    def _tried(self, batch: _Batch, attempt: int, sent: Future[Any]) -> None:
        try:
            answers = _matching(sent.value(), batch)
        except RpcTimeout:
            # At once: the patience itself was the pause, and grows with the attempt.
            self._try(batch, attempt + 1)
        except WorkerLost:
            # If only the connection was lost, the next attempt makes another one.
            pause = min(_LONGEST_PATIENCE, _FIRST_PAUSE * 2**attempt)
            self._agent.timer.later(pause, lambda: self._try(batch, attempt + 1))
        except Exception:  # noqa: BLE001 - logged; references report it as a leak too
            if not self._agent.ending:  # nothing of this worker's is awaited then
                count, to = len(batch.messages), batch.to
                _log.exception(
                    "%d messages %r to %d were refused.", count, batch.kind, to
                )
            self._end(batch)
        else:
            self._end(batch, answers)

    def _end(self, batch: _Batch, answers: Sequence[Any] | None = None) -> None:
        with self._lock:
            outbox = self._outboxes.get(batch.to)
            if outbox is None or outbox.batches.end(batch.number) is None:
                return  # `forget` or `close` has ended it
        if answers is None:
            _abandon(batch.messages)
            return
        for message, answer in zip(batch.messages, answers, strict=True):
            if message.answered is not None:
                message.answered(answer)


class _Outbox:
    """Messages to one worker: waiting ones, and batches without an answer."""

    def __init__(self) -> None:
        self.waiting: list[QueuedMessage] = []
        self.sending = False
        self.batches: Unsettled[_Batch] = Unsettled()
        self._numbers = itertools.count(1)

    def take(self, to: int) -> list[_Batch]:
        """Makes batches, one per kind, of the next waiting messages."""
        by_kind: dict[str, list[QueuedMessage]] = {}
        for message in self.waiting[:_LARGEST_BATCH]:
            by_kind.setdefault(message.kind, []).append(message)
        del self.waiting[:_LARGEST_BATCH]
        batches = []
        for kind, messages in by_kind.items():
            batches.append(_Batch(to, next(self._numbers), kind, messages))
            self.batches.begin(batches[-1].number, batches[-1])
        return batches

    def clear(self) -> list[QueuedMessage]:
        """Removes and returns all messages without an answer."""
        left = [one for batch in self.batches.clear() for one in batch.messages]
        left += self.waiting
        # A thread that is about to send these then finds none.
        self.waiting.clear()
        return left


class _Inbox:
    """Batches from one worker, and the answers that it may ask for again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.window = DedupWindow()
        self.answers: dict[int, Answers] = {}

    def prune(self, low_water_mark: int) -> None:
        """Forgets answers below the low-water mark, which the sender has."""
        for number in [number for number in self.answers if number < low_water_mark]:
            del self.answers[number]


def _matching(answers: Any, batch: _Batch) -> Sequence[Any]:
    """Checks that there is one answer for each message of a batch."""
    if type(answers) in (list, tuple) and len(answers) == len(batch.messages):
        return answers
    raise ProtocolError("A batch is answered by one answer for each message.")


def _answer(answers: Answers) -> Any:
    """Returns the answers for one attempt at delivery."""
    # A future of its own: cancelling an attempt must not cancel the others' answers.
    if isinstance(answers, Future):
        return answers.then(lambda done: done.value())
    return answers


def _abandon(messages: Iterable[QueuedMessage]) -> None:
    for message in messages:
        if message.unreachable is not None:
            message.unreachable()
