"""What a long measurement tells while it runs, and that it can be interrupted."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.verify import measure, progress
from jdist.verify.evaluation.piecewise import Pieces
from jdist.verify.oracle import FEW
from jdist.verify.steps.trajectory import FOLLOWED
from tests.rpc.sockets import wait_until


def losses(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2, axis=-1)


def gradient(w, x):
    return jax.value_and_grad(lambda w: losses(w, x).mean())(w)


def problem(rng, width):
    """Weights, and five examples."""
    w, x = rng.normal(size=(width, 7)) / 9, rng.normal(size=(5, width))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


LARGE = 10_007


def judged(rng, width):
    w, x = problem(rng, width)
    return verify.gradients(losses, w, x, {"right": gradient})


def test_a_log_has_lines(rng, monkeypatch, caplog, capfd):
    """One for each run; stderr, which is no terminal, has nothing."""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    caplog.set_level(logging.INFO, "jdist.verify")
    judged(rng, LARGE).raise_if_failed()
    lines = [x.getMessage() for x in caplog.records if x.name == "jdist.verify"]
    kinds = {name: [] for name in ("measuring rounding", "finite differences")}
    for line in lines:
        name, rest = line.split(": ")
        kinds[name].append(rest)
    for own in kinds.values():
        assert len(own) >= len(FEW)
        for number, rest in enumerate(own, 1):
            assert rest.startswith(f"{number} of {len(own)} runs, ")
        assert own[-1].endswith(", 0 s left")
    assert "measuring" not in "".join(capfd.readouterr())


def test_a_step_has_lines(rng, monkeypatch, caplog):
    """After those of each gradient, one for each trainer that is followed."""
    w, x = problem(rng, LARGE)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    caplog.set_level(logging.INFO, "jdist.verify")

    def update(params, gradient, state):
        return params - 0.1 * gradient, state

    def trainer(params, state, batch):
        return update(params, gradient(params, batch)[1], state)

    batches = [x, 2 * x]
    verify.step(
        losses, update, (w, None), batches, {"right": trainer}
    ).raise_if_failed()
    lines = [x.getMessage() for x in caplog.records if x.name == "jdist.verify"]
    followed = [x.split(": ")[1] for x in lines if x.startswith("following")]
    assert [x.split(" runs")[0] for x in followed] == [
        "1 of 1",
        *[f"{number} of {FOLLOWED + 1}" for number in range(1, FOLLOWED + 2)],
    ]


@pytest.mark.parametrize(("width", "shown"), [(LARGE, True), (11, False)])
def test_a_terminal_has_a_bar(rng, monkeypatch, capsys, width, shown):
    """But for a tiny program, which is measured before a bar could be read."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    judged(rng, width).raise_if_failed()
    told = capsys.readouterr()
    assert ("measuring rounding" in told.err) == shown
    assert "measuring" not in told.out


def test_an_interrupt_waits_for_one_piece(rng, monkeypatch):
    """What compiles beside the first run ends with it; the judge can be used again."""
    w, x = problem(rng, LARGE)
    compiled, begun = [], threading.Event()
    program = Pieces._program

    def one_at_a_time(self, *args):
        if threading.current_thread() is not threading.main_thread():
            compiled.append(None)
            begun.set()
            wait_until(lambda: self._abandoned)
        return program(self, *args)

    def interrupted(self, *_):
        assert begun.wait(60)
        raise KeyboardInterrupt("by the user")

    judge = verify.gradients_judge(losses)
    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "_program", one_at_a_time)
        patch.setattr(measure._Examples, "_measured", interrupted)
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            judge(w, x, {"right": gradient})
    assert len(compiled) == 1
    judge(w, x, {"right": gradient}).raise_if_failed()
    assert not judge(w, x, {"wrong": lambda w, x: gradient(1.01 * w, x)}).ok


def test_the_rate_is_that_of_the_runs_so_far(monkeypatch, caplog):
    now = iter(np.arange(0, 70, 7.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    caplog.set_level(logging.INFO, "jdist.verify")
    with progress.progress("measuring", 7) as advance:
        for _ in range(4):
            advance()
    assert [x.getMessage() for x in caplog.records] == [
        "measuring: 2 of 7 runs, 35 s left",
        "measuring: 4 of 7 runs, 21 s left",
    ]
