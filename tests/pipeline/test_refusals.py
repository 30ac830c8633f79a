"""One worker deviates: all raise, none trains, and the next step is right on all."""

import os
import re

from tests.pipeline import refusals

DRAWS = int(os.environ.get("JDIST_REFUSALS", "12"))
"""At random, after one of each kind."""
SEED = int(os.environ.get("JDIST_REFUSALS_SEED", "0"))


def on_each(cluster, body, *args):
    tasks = [cluster.start(rank, body, *args) for rank in range(3)]
    return [task.result() for task in tasks]


def check(found):
    """All were told the reason, and which worker it came from."""
    by_name = {made.__name__: text for made, text in refusals.DEVIATIONS.items()}
    for draw in zip(*found, strict=True):
        (name, call, culprit, _), *_ = draw
        texts = [text for *_, text in draw]
        for rank, text in enumerate(texts):
            assert re.search(by_name[name], text), (name, call, culprit, rank, text)
        notes = [re.findall(r"Raised on worker '(worker\d)'", text) for text in texts]
        if "must be called by all" in texts[0] or "same batch, weights" in texts[0]:
            assert all(f"'worker{culprit}'" in text for text in texts), texts
        else:
            others = [rank for rank in range(3) if rank != culprit]
            assert not notes[culprit], texts
            assert all(notes[r] == [f"worker{culprit}"] for r in others), texts


def test_random_deviations(processes):
    found = on_each(processes, refusals.draws, SEED, DRAWS)
    assert [len(told) for told in found] == [len(refusals.DEVIATIONS) + DRAWS] * 3
    check(found)
