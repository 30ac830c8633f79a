"""`python -m jdist.verify`: the matrix, and a user's own problem, and its errors."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jdist import JdistError, Unavailable, verify
from jdist._own_code import OwnCodeRaised
from jdist.verify import __main__ as command
from jdist.verify import matrix
from jdist.verify.problem import Problem, load, standard
from tests.plugin_notices import without_notices

MODULE = """
import jax, jax.numpy as jnp
from jdist import verify

def losses(w, x):
    return (x @ w) ** 3

x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
w = jnp.array([0.3, 0.4])

def right(w, x):
    return jax.value_and_grad(lambda w: losses(w, x).mean())(w)

def wrong(w, x):
    return jax.value_and_grad(lambda w: losses(w, x).sum())(w)

problem = verify.Problem(losses, w, x, {"right": right})

def made():
    return verify.Problem(losses, w, x, {"wrong": wrong})

@jax.jit
def chaos(w, x):
    return jax.lax.fori_loop(0, 200, lambda i, h: 4 * h * (1 - h), 0.4 + (x @ w) / 99)

def chaotic(w, x):
    loss, gradient = jax.value_and_grad(lambda w: chaos(w, x).mean())(w)
    return loss, gradient / 2

hopeless = verify.Problem(chaos, w, x, {"right": chaotic})

def crash():
    raise ValueError("the disk is full")

def leave():
    raise SystemExit(0)

def refusing(w, x):
    raise ValueError("no such bucket")

def refusing_loss(w, x):
    raise TypeError("no such layer")

in_candidate = verify.Problem(losses, w, x, {"mine": refusing})
in_loss = verify.Problem(refusing_loss, w, x, {"right": right})
bad_weights = verify.Problem(losses, w, x, {"right": right}, weights=jnp.zeros(3))

@jax.custom_vjp
def tripled(w, x):
    return (x @ w) ** 2

tripled.defvjp(
    lambda w, x: (tripled(w, x), (w, x)),
    lambda saved, c: (3 * ((2 * c * (saved[1] @ saved[0])) @ saved[1]), None),
)

def right_of_tripled(w, x):
    return jax.value_and_grad(lambda w: tripled(w, x).mean())(w)

on_purpose = verify.Problem(tripled, w, x, {"right": right_of_tripled})
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module in the current folder."""
    (tmp_path / "users_own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    # The backend of this process has started; only a fresh one may choose devices.
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    return tmp_path


def test_a_users_problem_is_judged(module, capsys):
    """0 and a table if it holds; 1 and the leaf if it does not; JSON on request."""
    assert command.main(["users_own:problem", "--json", "out.json"]) == 0
    assert "users_own:problem holds" in capsys.readouterr().out
    assert json.loads((module / "out.json").read_text())["ok"]
    assert command.main(["users_own:made"]) == 1
    shown = capsys.readouterr().out
    assert "it is 3 times the reference" not in shown.splitlines()[0]
    assert "3 times" in " ".join(shown.split())
    assert "FAILED" in shown


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--json", "none/out.json"], "must be a file in a folder that exists, not no"),
        (["--json", "."], "must be a file in a folder that exists, not ."),
        (["--cpu-devices", "0"], "must be at least 1, not 0"),
    ],
)
def test_an_option_is_refused_before_anything_is_judged(
    module, option, message, capsys
):
    with pytest.raises(SystemExit, match="2"):
        command.main(["users_own:problem", *option])
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("users_own", "must be module:name, such as mymodule:problem. Got 'users_own'"),
        ("absent_module:problem", "names the module 'absent_module', which does not"),
        ("users_own:absent", "names 'absent', which users_own does not define"),
        ("users_own:number", "must be a verify.Problem, or a function.*Got an int"),
    ],
)
def test_wrong_specifications_get_a_clear_error(module, capsys, specification, message):
    """Exit status 2, a line on standard error, no traceback."""
    with pytest.raises(ValueError, match=message):
        load(specification)
    assert command.main([specification]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("users_own:crash", r"users_own:crash\(\) raised ValueError: the disk is full"),
        ("users_own:leave", r"users_own:leave\(\) raised SystemExit: 0"),
        (
            "users_own:in_candidate",
            "candidate 'mine' raised ValueError: no such bucket",
        ),
        ("users_own:in_loss", "loss_fn raised TypeError: no such layer"),
        ("broken:problem", "importing broken raised ModuleNotFoundError: .*no_such_p"),
        ("gone:problem", "importing gone raised SystemExit: 0"),
        ("inside.broken:problem", "importing inside raised NameError"),
    ],
)
def test_code_that_raises_is_no_wrong_gradient(module, capsys, specification, message):
    """Exit status 4 and the traceback, wherever in the user's code it happens."""
    (module / "broken.py").write_text("import no_such_package\n")
    (module / "gone.py").write_text("import sys\nsys.exit(0)\n")
    (module / "inside").mkdir()
    (module / "inside" / "__init__.py").write_text("undefined\n")
    with pytest.raises(OwnCodeRaised, match=message):
        load(specification).guarded().judge()
    assert command.main([specification]) == 4
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "error:" in shown


def test_what_cannot_be_judged_has_its_own_status(module, capsys):
    """Two hundred steps of a chaotic map: all digits are lost, and zero would pass."""
    assert command.main(["users_own:hopeless"]) == 3
    shown = capsys.readouterr().out
    assert "not judged" in shown
    assert shown.rstrip().endswith("NOT JUDGED")


def test_a_derivative_on_purpose_can_be_left_unchecked(module, capsys):
    """By an option, which the matrix refuses."""
    assert command.main(["users_own:on_purpose"]) == 3
    assert "a derivative of its own" in " ".join(capsys.readouterr().out.split())
    option = "--no-finite-differences"
    assert command.main(["users_own:on_purpose", option]) == 0
    assert "oracle" not in capsys.readouterr().out
    assert command.main([option]) == 2
    assert "goes with a problem" in " ".join(capsys.readouterr().err.split())


def test_wrong_arguments_of_a_problem_are_a_wrong_call(module, capsys):
    """Weights that are all 0 are the problem's mistake, not its code's."""
    assert command.main(["users_own:bad_weights"]) == 2
    assert "not all 0" in " ".join(capsys.readouterr().err.split())


def test_an_error_inside_the_judge_is_no_wrong_gradient(module, monkeypatch, capsys):
    """Python's exit status for an uncaught exception would read as a verdict."""

    def broken(problem):
        raise KeyError("lost")

    monkeypatch.setattr(Problem, "judge", broken)
    assert command.main(["users_own:problem"]) == 4
    assert "KeyError: 'lost'" in capsys.readouterr().err


def test_an_interrupt_concludes_nothing(monkeypatch, capsys):
    """One line, and the exit status of shells."""

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    monkeypatch.setattr(command, "_judge_matrix", interrupted)
    assert command.main([]) == command.Status.INTERRUPTED == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_every_exit_status_is_documented(capsys):
    """In `--help` and in docs/verify.md."""
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main(["--help"])
    shown = capsys.readouterr().out
    docs = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    for status in command.Status:
        assert f"\n  {status:d}  " in shown
        assert f"\n| {status:d} |" in docs


def test_the_matrix_from_a_fresh_process(tmp_path):
    """The command as a user runs it: every row of one column, exit status 0."""
    out = tmp_path / "matrix.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "jdist.verify", "--all", "--reductions", "mean",
            "--json", str(out),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(out.read_text())
    assert f"{len(cells)} of {len(cells)} gradients judged" in done.stdout
    assert {cell["strategy"] for cell in cells} == set(matrix.strategies())
    assert {cell["dtype"] for cell in cells} == {"float32"}
    assert without_notices(done.stderr) == ""
    assert any("x4" in cell["strategy"] for cell in cells)


def honest(loss_fn, reduction):
    """A strategy that is nothing but jax.value_and_grad."""

    def candidate(params, batch, weights):
        w = jnp.asarray(weights, batch["x"].dtype)
        return jax.value_and_grad(
            lambda p: jnp.sum(loss_fn(p, batch) * w) / jnp.sum(w)
        )(params)

    return candidate


def unweighted(loss_fn, reduction):
    """A strategy that forgets the weights."""
    return lambda params, batch, weights: jax.value_and_grad(
        lambda p: jnp.mean(loss_fn(p, batch))
    )(params)


def absent(loss_fn, reduction):
    """A strategy for hardware that is not here."""
    raise Unavailable("needs 512 devices, there are 8 [cpu]")


def test_failing_and_missing_rows(monkeypatch, capsys):
    """A wrong row fails the run; a row without its hardware is skipped by name."""
    rows = {"honest": honest, "absent": absent, "unweighted": unweighted}
    monkeypatch.setattr(matrix, "strategies", lambda **_: rows)
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    one = ["--dtypes", "float64", "--reductions", "mean", "--processes", "1"]
    assert command.main(one) == 1
    shown = capsys.readouterr().out
    assert "skipped absent: needs 512 devices, there are 8 [cpu]" in shown
    assert "unweighted: shared: off by" in shown
    assert "FAILED" in shown
    assert command.main([*one, "--rows", "honest"]) == 0
    judged = "1 of 1 gradients judged, all equal to one device's in float64"
    assert judged in capsys.readouterr().out
    assert command.main([*one, "--rows", "nothing"]) == 2
    assert "no strategy has 'nothing' in its name" in capsys.readouterr().err


def test_rows_are_judged_by_a_loss_whose_rules_see_a_scale(monkeypatch, capsys):
    """Of the mean and the sum, which all rows know before their backward pass."""

    def scaled(loss_fn, reduction):
        right = honest(lambda *given: 8 * loss_fn(*given), reduction)
        return lambda *given: jax.tree.map(lambda x: x / 8, right(*given))

    rows = {"honest": honest, "scaled": scaled}
    monkeypatch.setattr(matrix, "strategies", lambda **_: rows)
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    one = ["--dtypes", "float64", "--processes", "1"]
    assert command.main([*one, "--reductions", "mean"]) == 0
    capsys.readouterr()
    assert command.main([*one, "--rules", "--reductions", "max", "mean"]) == 1
    heading = capsys.readouterr().out.splitlines()[1]
    assert heading.split() == ["mean"]
    mean = ["--rules", "--reductions", "mean"]
    assert command.main([*one, *mean, "--rows", "honest"]) == 0
    judged = "1 of 1 gradients judged, all equal to one device's in float64"
    assert judged in capsys.readouterr().out
    assert command.main([*one, "--rules", "--reductions", "max", "min"]) == 2
    assert "--rules is for the reductions mean and sum" in capsys.readouterr().err


def test_the_heading_is_shown_before_strategies_are_imported(monkeypatch, capsys):
    """And every line before the next strategy is built, also into a pipe."""
    shown = []

    def strategies(**_):
        shown.append(capsys.readouterr().out)
        return {"first": absent, "second": late}

    def late(loss_fn, reduction):
        shown.append(capsys.readouterr().out)
        raise Unavailable("needs 512 devices, there are 8 (cpu)")

    monkeypatch.setattr(matrix, "strategies", strategies)
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    one = ["--dtypes", "float64", "--reductions", "mean", "--processes", "1"]
    command.main([*one, "-k", ""])
    heading, *_, first = shown
    assert heading.split()[-1] == "mean"
    assert first.split() == ["first", "float64", "skipped"]


def test_a_number_of_processes_is_at_least_one(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["--processes", "0"])
    assert "must be at least 1, not 0" in capsys.readouterr().err


def test_a_run_that_judged_nothing_does_not_pass(monkeypatch, capsys):
    """Every row skipped is no proof."""
    monkeypatch.setattr(matrix, "strategies", lambda **_: {"absent": absent})
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    assert command.main(["--dtypes", "float64", "--reductions", "mean"]) == 3


def test_a_strategy_that_raises_is_no_wrong_gradient(monkeypatch, capsys):
    """Its ValueError is a defect of the strategy, not a wrong call."""

    def raising(loss_fn, reduction):
        raise ValueError("no such reduction")

    monkeypatch.setattr(matrix, "strategies", lambda **_: {"raising": raising})
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    assert command.main(["--dtypes", "float64", "--reductions", "mean"]) == 4
    assert "no such reduction" in capsys.readouterr().err


class Entry:
    """An entry point that provides some strategies."""

    def __init__(self, found):
        self.found = found

    def load(self):
        """A function that returns strategies."""
        return lambda: self.found


def test_combinations_are_judged_on_request(monkeypatch, capsys):
    """By `--all`, or by a part of a name; otherwise their number is told."""
    more = {"honest, in twos": honest, "honest, in threes": honest}
    entry = Entry({"honest": honest, "absent": absent, "combinations": more})
    monkeypatch.setattr(matrix.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setattr(matrix, "set_cpu_device_count", lambda count: None)
    one = ["--dtypes", "float64", "--reductions", "mean", "--processes", "1"]
    assert command.main(one) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 gradients judged" in shown
    assert "2 more combinations of these are judged with --all" in shown
    for options, count in ((["--all"], "3 of 4"), (["-k", "in twos"], "1 of 1")):
        assert command.main([*one, *options]) == 0
        shown = capsys.readouterr().out
        assert f"{count} gradients judged" in shown
        assert "more combinations" not in shown


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no strategy is registered.*Is jdist installed"),
        ([Entry({"same": honest})] * 2, "two entry points .* provide 'same'"),
        (
            [Entry({"same": honest}), Entry({"more": {"same": honest}})],
            "provide 'same'",
        ),
    ],
)
def test_registration_mistakes(monkeypatch, entries, message):
    """jdist not installed; one name used twice, also by a combination."""
    monkeypatch.setattr(matrix.metadata, "entry_points", lambda group: entries)
    with pytest.raises(JdistError, match=message):
        matrix.strategies()


def test_the_standard_problem_can_tell():
    """Sizes differ, a weight is 0, no extreme is nearly tied, one leaf is unused."""
    problem = standard(jnp.float32)
    shapes = {leaf.shape for leaf in problem.params.values()}
    assert len(shapes) == len(problem.params)
    assert (problem.weights == 0).sum() == 1
    losses = jnp.sort(problem.loss_fn(problem.params, problem.batch))
    assert (jnp.diff(losses)[jnp.array([0, -1])] > 0.01 * losses[-1]).all()
    judged = verify.gradients(
        problem.loss_fn, problem.params, problem.batch,
        {"honest": lambda p, b: honest(problem.loss_fn, "mean")(p, b, problem.weights)},
        weights=problem.weights,
    )  # fmt: skip
    assert judged.ok


def test_the_callers_precision_is_left_alone():
    """Columns are judged in double precision; what runs between them is not."""
    with jax.enable_x64(False):
        for cells in matrix.judge({"absent": absent}, ("mean", "sum"), ("float32",)):
            assert [cell.skipped for cell in cells]
            assert jnp.asarray(1.0).dtype == jnp.float32
        assert jnp.asarray(1.0).dtype == jnp.float32
