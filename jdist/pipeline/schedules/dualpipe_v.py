"""DualPipeV: forward passes of one direction next to backward passes of the other."""

from functools import partial

from jdist._errors import value_error
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.patterns import Phase, phases
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.v_shaped import v_schedule


def dualpipe_v(n: int, m: int) -> Schedule:
    """DualPipeV for n workers with stages j and 2n - 1 - j each, and m micro-batches.

    In its steady phase a worker pairs a forward pass of one of its stages with a
    backward pass of the other, which on an accelerator hides the messages of each
    behind the work of the other. Here the two are consecutive actions; an executor may
    start them together. Backward passes are split at the beginning and the end only.

    Raises:
      ValueError: A number is below 1, or there are fewer than 2n micro-batches.

    Source:
      DeepSeek-AI, DualPipe (github.com/deepseek-ai/DualPipe); the V form is Sea AI
      Lab's "cut-in-half".

    Example:
      >>> print(dualpipe_v(1, 2))
      worker 0 | 0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1 0W1
    """
    check_counts("dualpipe_v", n=n, m=m)
    if m < 2 * n:
        rule = f"must be at least {2 * n}, one per stage"
        raise value_error("dualpipe_v(m=...)", rule, m)
    programs = [phases(_patterns(n, m, j), [j, 2 * n - 1 - j], m) for j in range(n)]
    return v_schedule("DualPipeV", m, programs, partial(dualpipe_v, n))


def _patterns(n: int, m: int, j: int) -> list[Phase]:
    # Workers behind this one on the way to the turn of the V.
    behind = n - j - 1
    # The second half of the last 2 (j + 1) backward passes is split.
    whole, odd = divmod(j + 1, 2)
    return [
        ("F0", 2 * behind),
        ("F0 F1", j + 1),
        ("I1 W F1", behind),
        # Steady phase: the pairs of a forward and a backward pass.
        ("F0 B1 F1 B0", m - 2 * n + j + 1),
        ("B1 F1 B0", behind),
        ("B1 B0", whole),
        ("B1 I0", odd),
        ("I1 I0", whole),
        ("W I0", behind),
        ("W", j + 1),
    ]
