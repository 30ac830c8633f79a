"""Messages between workers that arrive exactly once, in any order.

A message is sent until it is answered, with growing pauses, as long as its receiver
belongs to the group. The receiver answers a message that came before with the answer
that it gave then. What gathers while one message is under way goes together.
"""

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jdist.rpc.base.errors import ProtocolError, RpcTimeout, WorkerLost
from jdist.rpc.base.future import Future, call_when_done
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.rref.dedup_window import DedupWindow, UnsettledNumbers
from jdist.rpc.rref.keeper import GATHERING, Keeper
from jdist.rpc.rref.messages import Accept, Message
from jdist.rpc.rref.wire import KINDS, pack, unpack

if TYPE_CHECKING:
    from jdist.rpc.calls.agent import Agent

Callback = Callable[[], None]
_log = logging.getLogger("jdist.rpc")
_MOST = 1000
_FIRST_PATIENCE = 1.0
_LONGEST_PATIENCE = 30.0
_FIRST_PAUSE = 0.01


class Batch(NamedTuple):
    """Messages of one kind to one worker, sent together.

    Attributes:
      to: Number of the receiver.
      number: Their common number.
      kind: Of all of them.
      messages: In the order in which they were posted.
    """

    to: int
    number: int
    kind: type
    messages: Sequence[Message]


class ReliableDelivery:
    """One worker's messages to all others, and from them.

    Args:
      agent: The worker.
      keeper: Knows when to try again.
      receive: `receive(sender, messages)`: takes in messages of one kind; an answer for
        each, and what remains to be done once the answers are noted.
      answered: `answered(message, answer)`: told of each message that arrived.
    """

    def __init__(
        self,
        agent: "Agent",
        keeper: Keeper,
        receive: Callable[[int, Sequence[Message]], tuple[list[Any], Callback]],
        answered: Callable[[Message, Any], None],
    ) -> None:
        self._agent = agent
        self._keeper = keeper
        self._receive = receive
        self._answered = answered
        self.patience = _FIRST_PATIENCE
        self._lock = threading.Lock()
        self._outboxes: collections.defaultdict[int, _Outbox]
        self._outboxes = collections.defaultdict(_Outbox)
        self._inboxes: collections.defaultdict[int, _Inbox]
        self._inboxes = collections.defaultdict(_Inbox)
        for kind, name in KINDS.items():
            agent.register(name, _Reader(self, kind))

    def send(self, to: int, message: Message) -> None:
        """Has the message arrive; returns at once, on any thread."""
        waits = isinstance(message, Accept)
        with self._lock:
            outbox = self._outboxes[to]
            outbox.waiting.append(message)
            if outbox.sending or (waits and len(outbox.waiting) > 1):
                return
            outbox.sending = not waits
        if waits:
            self._keeper.later(GATHERING, lambda: self._send_gathered(to, outbox))
        else:
            self._agent.pool.run(lambda: self._empty(to, outbox))

    def _send_gathered(self, to: int, outbox: "_Outbox") -> None:
        with self._lock:
            if outbox.sending or not outbox.waiting:
                return
            outbox.sending = True
        self._empty(to, outbox)

    def idle(self) -> bool:
        """Whether everything sent has arrived."""
        with self._lock:
            return all(
                not outbox.waiting and not outbox.numbers
                for outbox in self._outboxes.values()
            )

    def forget(self, worker: int) -> None:
        """A worker is gone: what is under way to it need not arrive."""
        with self._lock:
            self._outboxes.pop(worker, None)
            self._inboxes.pop(worker, None)

    def read(self, sender: WorkerInfo, kind: type, body: Any) -> list[Any]:
        """What to answer to a batch that came."""
        if type(body) is not tuple or len(body) != 3 or type(body[2]) is not list:
            raise ProtocolError(
                "Messages about references need a number and a low-water mark."
            )
        number, low_water_mark, rows = body
        if type(number) is not int or type(low_water_mark) is not int:
            raise ProtocolError(
                "Messages about references need a number and a low-water mark."
            )
        messages = [unpack(kind, row) for row in rows]
        with self._lock:
            inbox = self._inboxes[incarnation_of(sender)]
        with inbox.lock:
            if not inbox.window.take(number, low_water_mark):
                return inbox.answers.get(number, [None] * len(messages))
            inbox.prune(low_water_mark)
            answers, react = self._receive(incarnation_of(sender), messages)
            inbox.answers[number] = answers
        react()
        return answers

    # --- sending ---

    def _empty(self, to: int, outbox: "_Outbox") -> None:
        while True:
            with self._lock:
                if not outbox.waiting:
                    outbox.sending = False
                    return
                batches = outbox.take(to)
            for batch in batches:
                self._try(batch, 0)

    def _try(self, batch: Batch, attempt: int) -> None:
        with self._lock:
            outbox = self._outboxes.get(batch.to)
            if outbox is None or batch.number not in outbox.numbers:
                return
            low_water_mark = outbox.numbers.low_water_mark
        body = (
            batch.number,
            low_water_mark,
            [pack(message) for message in batch.messages],
        )
        patience = min(_LONGEST_PATIENCE, self.patience * 2**attempt)
        peer = self._agent.directory.of_incarnation(batch.to)
        assert peer is not None, "only workers that were met are told anything"
        try:
            sent = self._agent.call_async(peer.info, KINDS[batch.kind], body, patience)
        except Exception as error:  # noqa: BLE001 - handled as one that comes later
            sent = Future()
            sent.set_exception(error)
        call_when_done(sent, lambda: self._over(batch, attempt, sent))

    def _over(self, batch: Batch, attempt: int, sent: Future[Any]) -> None:
        try:
            answers = sent.value()
        except RpcTimeout:
            self._try(batch, attempt + 1)
        except WorkerLost:
            receiver = self._agent.directory.of_incarnation(batch.to)
            if receiver is None or receiver.departed is not None:
                self._settle(batch)
                return
            # Only the connection was lost, and the next attempt makes another one.
            pause = min(_LONGEST_PATIENCE, _FIRST_PAUSE * 2**attempt)
            self._keeper.later(pause, lambda: self._try(batch, attempt + 1))
        except Exception:  # noqa: BLE001 - told in the log, and as a leak in the end
            self._settle(batch)
            if not self._agent.closed:
                _log.exception("%s was refused.", batch)
        else:
            self._settle(batch)
            for message, answer in zip(batch.messages, answers, strict=True):
                self._answered(message, answer)

    def _settle(self, batch: Batch) -> None:
        with self._lock:
            outbox = self._outboxes.get(batch.to)
            if outbox is not None:
                outbox.numbers.end(batch.number)


class _Reader:
    """Answers frames of one kind."""

    def __init__(self, post: ReliableDelivery, kind: type) -> None:
        self._post = post
        self._kind = kind

    def __call__(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        return self._post.read(caller, self._kind, body)


class _Outbox:
    """What one worker is to be told."""

    def __init__(self) -> None:
        self.waiting: list[Message] = []
        self.sending = False
        self.numbers = UnsettledNumbers()
        self._last = 0

    def take(self, to: int) -> list[Batch]:
        """The next messages that wait, by kind; they are under way from now on."""
        by_kind: collections.defaultdict[type, list[Message]]
        by_kind = collections.defaultdict(list)
        for message in self.waiting[:_MOST]:
            by_kind[type(message)].append(message)
        del self.waiting[:_MOST]
        batches = []
        for kind, messages in by_kind.items():
            self._last += 1
            self.numbers.begin(self._last)
            batches.append(Batch(to, self._last, kind, messages))
        return batches


class _Inbox:
    """What one worker has told, and what it was answered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.window = DedupWindow()
        self.answers: dict[int, list[Any]] = {}

    def prune(self, low_water_mark: int) -> None:
        """The sender has the answers to all numbers below."""
        for number in [number for number in self.answers if number < low_water_mark]:
            del self.answers[number]
