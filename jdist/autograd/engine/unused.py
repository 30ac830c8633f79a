"""Words for a pass that waits for gradients which nobody will send."""

from collections.abc import Mapping, Sequence

from jdist.autograd.engine.messages import StarvingSend
from jdist.autograd.graph.node import RecvNode


def explain(
    starving: Mapping[str, Sequence[StarvingSend]],
    unreached: Sequence[RecvNode],
    smart: bool,
) -> str:
    """Names what is waited for, why it does not come, and what to do.

    Args:
      starving: Send functions without a gradient, by the name of their worker.
      unreached: Receive functions here that the roots do not reach.
      smart: The mode.
    """
    waits = "; ".join(
        f"{one.name} (message {one.message_id}, on {worker!r})"
        for worker, sends in starving.items()
        for one in sends
    )
    if smart:
        return (
            f"these send functions were marked, and no gradient came for them: {waits}."
        )
    unused = "".join(
        f" Message {node.message_id}, received from {node.worker!r}, takes no part in "
        "this pass."
        for node in unreached
    )
    return (
        f"FAST mode waits for a gradient at every send function of the context, and "
        f"none will come for {waits}.{unused} Use mode='smart', which waits only for "
        "what the roots depend on."
    )
