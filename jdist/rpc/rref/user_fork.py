"""The user's side of the protocol: forks of this worker, until their owners know."""

from jdist.rpc.base.ids import GloballyUniqueId

__all__ = ["UserFork"]


class UserFork:
    """One fork of this worker.

    It may be dropped when the owner counts it (or never will) and when all forks that
    were made of it are counted too: until then it is what keeps the value for them.

    Attributes:
      owner: Incarnation of the worker that has the value.
      rref: Id of the reference.
      fork: Id of this fork.
      giver: Incarnation of the worker from which it came; None for the creator's own.
      counted: Whether the owner is known to count it.
      failed: Why the owner never will, or is gone.
      dropped: Whether the program has no use for it any more.
      children: How many forks made of it are not counted yet.
    """

    __slots__ = (
        "children", "counted", "dropped", "failed", "fork", "giver", "owner", "rref",
    )  # fmt: skip

    def __init__(
        self,
        owner: int,
        rref: GloballyUniqueId,
        fork: GloballyUniqueId,
        giver: int | None,
    ) -> None:
        self.owner = owner
        self.rref = rref
        self.fork = fork
        self.giver = giver
        self.counted = False
        self.failed: str | None = None
        self.dropped = False
        self.children = 0

    @property
    def pending(self) -> bool:
        """Whether the owner has not answered yet."""
        return not self.counted and self.failed is None

    @property
    def over(self) -> bool:
        """Whether the owner may be told that it was dropped."""
        return self.dropped and not self.children and not self.pending
