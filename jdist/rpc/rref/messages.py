"""What workers tell each other about references, as data.

A *fork* is one worker's share in a reference: it is what the owner counts. The *giver*
of a fork is the worker that sent the reference in a call or an answer, the *receiver*
the one that got it. `ReliableDelivery` has every message below handled exactly once, in
any order.
"""

from typing import NamedTuple

from jdist.rpc.base.ids import GloballyUniqueId


class Ref(NamedTuple):
    """A reference within a call or an answer: a fork on its way to its receiver.

    Attributes:
      owner: Number of the worker that has the value.
      rref: Id of the reference, the same for all its forks.
      fork: Id of this fork; made by the giver.
      low_water_mark: All forks below it from this giver to this receiver have arrived.
    """

    owner: int
    rref: GloballyUniqueId
    fork: GloballyUniqueId
    low_water_mark: int


class Fork(NamedTuple):
    """To the owner, by a receiver: count this fork as mine. Answer: see `Protocol`."""

    rref: GloballyUniqueId
    fork: GloballyUniqueId


class Accept(NamedTuple):
    """To the giver: this fork arrived, and the owner counts it."""

    fork: GloballyUniqueId


class Delete(NamedTuple):
    """To the owner: nobody uses this fork any more."""

    rref: GloballyUniqueId
    fork: GloballyUniqueId


class Take(NamedTuple):
    """To the receiver: the call or answer with this fork was lost.

    Whoever has not got it takes it now and drops it at once, so that the fork ends as
    every other one does. Should the lost message arrive after all, it is refused.
    """

    ref: Ref


class Abort(NamedTuple):
    """To the owner, by the creator: its request to create the value has failed.

    If that did not arrive, it counts as having arrived and raised this. Either way the
    creator's fork is counted afterwards.
    """

    rref: GloballyUniqueId
    fork: GloballyUniqueId
    low_water_mark: int
    reason: str


Message = Fork | Accept | Delete | Take | Abort
