"""The runner: lists, runs, writes, and fails when a claim does."""

import json
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from experiments import __main__ as command
from experiments import _report, _runner
from experiments._result import Claim, Picture, Result
from tests.plugin_notices import without_notices

COMMAND = [sys.executable, "-m", "experiments"]


def toy(holds):
    """A module that is an experiment."""

    def run(settings, progress):
        figure, axes = plt.subplots()
        axes.plot([1, 2])
        return Result(
            claims=[
                Claim("1 = 1", True, "1", leads=True),
                Claim("a < b", holds, "<b>"),
                Claim("[x] is fast", False, "9 s").unless("it is quick"),
            ],
            pictures=[Picture("line", "A line & more", figure)],
            tables={"Numbers": [["n", "square"], ["2", "4"]]},
            data={"quick": settings.quick, "devices": settings.devices},
            notes=["skipped nothing"],
        )

    module = types.ModuleType(
        "experiments.toy", "Is one claim\nmore than none?\n\nMore."
    )
    module.run = run
    return module


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder for results, and a way to make toy experiments known."""

    def known(**modules):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"experiments.{name}", module)
        monkeypatch.setattr(_runner, "names", lambda: sorted(modules))
        # The backend of this process has started; only a fresh one may choose devices.
        monkeypatch.setattr(command.jax.config, "update", lambda *_: None)
        return ["--out", str(tmp_path)]

    return known, tmp_path


def test_without_a_name_it_lists(here, capsys):
    """Each experiment with its question, the docstring's first paragraph."""
    known, _ = here
    assert command.main(known(toy=toy(True))) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "toy Is one claim more than none?" in shown
    assert "More." not in shown


def test_a_run_leaves_json_pictures_and_a_page(here, capsys):
    """And ends with a line that says what was proved and where to look."""
    known, folder = here
    out = known(toy=toy(True))
    assert command.main(["toy", "--quick", "--devices", "3", *out]) == 0
    shown = capsys.readouterr().out
    last = shown.splitlines()[-1]
    told = "2 of 3 claims hold, 1 were not judged: 1 = 1 (1). "
    told += "Not judged, because it is quick: [x] is fast (9 s). "
    assert last.startswith(f"Proved in part (0 s): {told}Report: ")
    assert "[x] is fast" in shown
    assert "not judged: it is quick; measured: 9 s" in shown
    assert last.endswith("report.html")
    record = json.loads((folder / "toy.json").read_text())
    assert record["holds"]
    assert record["data"] == {"quick": True, "devices": 3}
    verdicts = [(c["text"], c["verdict"], c["holds"]) for c in record["claims"]]
    assert verdicts[1:] == [
        ("a < b", "holds", True),
        ("[x] is fast", "not judged", None),
    ]
    assert record["outcome"] == told.strip()
    assert {"python", "jax", "jdist", "device", "cores"} <= set(record["environment"])
    page = (folder / "report.html").read_text()
    assert "1 of 1 experiments hold, 1 of them in part. Of 3" in page
    assert "claims 1 were not judged." in page
    assert "<td>–</td><td>[x] is fast</td><td>not judged: it is quick; meas" in page
    assert "data:image/png;base64," in page
    assert "&lt;b&gt;" in page
    assert "A line &amp; more" in page
    assert 'src="http' not in page
    contents = '<a href="#toy">toy</a>: <span class="part">holds in part</span>, quick'
    assert contents in page
    assert '<p class="proved part">2 of 3 claims hold, 1 were not judged: 1' in page
    assert '<h2 id="toy">toy, quick form</h2>' in page
    assert not list(folder.glob("*.unfinished"))


def test_a_failing_claim_fails_the_run(here, capsys):
    """Exit status 1, on the terminal and on the page; the other one still runs."""
    known, folder = here
    out = known(bad=toy(False), good=toy(True))
    assert command.main(["all", *out]) == 1
    shown = capsys.readouterr().out
    start = "FAILED (0 s): 1 of 3 claims hold, 1 were not judged. "
    assert f"{start}Does not hold: a < b (<b>). Not judged, because it" in shown
    start = "Proved in part (0 s): 2 of 3 claims hold, 1 were not judged"
    assert f"{start}: 1 = 1 (1)." in shown
    page = (folder / "report.html").read_text()
    assert "1 of 2 experiments hold, 1 of them in part." in page
    assert '<a href="#bad">bad</a>: <span class="bad">does not hold</span></li>' in page
    assert "quick form" not in page
    assert "Does not hold: a &lt; b (&lt;b&gt;)." in page


def test_only_what_was_judged_whole_is_green(here, capsys):
    """A claim beside a measurement that was not judged is not proved by the others."""
    known, folder = here
    whole = toy(True)
    run = whole.run
    whole.run = lambda *given: replace(run(*given), claims=run(*given).claims[:2])
    assert command.main(["all", *known(toy=toy(True), whole=whole)]) == 0
    shown = capsys.readouterr().out
    assert "Proved (0 s): 2 of 2 claims hold: 1 = 1 (1). Report: " in shown
    page = (folder / "report.html").read_text()
    assert "2 of 2 experiments hold, 1 of them in part. Of 5" in page
    assert '<a href="#whole">whole</a>: <span class="good">holds</span></li>' in page
    assert '<p class="proved good">2 of 2 claims hold: 1 = 1 (1).</p>' in page
    assert page.count('class="proved good"') == page.count('class="proved part"') == 1


def test_claims_that_were_not_judged_are_listed_by_their_reasons():
    claims = [
        Claim("a", True, "1"),
        *(
            Claim(f"time {n}", False, f"{n} s").unless("no core is free")
            for n in (3, 5)
        ),
        Claim("c", None, "", "no GPU is here"),
    ]
    expected = "1 of 4 claims hold, 3 were not judged. Not judged, because no core is "
    expected += (
        "free: time 3 (3 s); time 5 (5 s). Not judged, because no GPU is here: c."
    )
    assert Result(claims).outcome == expected


def test_an_experiment_without_claims_proves_nothing():
    """An empty list of claims is not success."""
    assert not Result([]).holds


def test_an_experiment_that_judges_nothing_proves_nothing():
    """However much it leaves open; and one failure is enough."""
    left = Claim("a", None, "", "no time")
    assert not Result([left, left]).holds
    assert Result([left, Claim("b", True, "")]).holds
    assert not Result([left, Claim("b", True, ""), Claim("c", False, "")]).holds


def test_a_claim_is_judged_or_says_why_not():
    for wrong in (("a", None, "1"), ("a", True, "1", "no time")):
        with pytest.raises(ValueError, match="not judged and no reason, or both: 'a'"):
            Claim(*wrong)
    claim = Claim("a", False, "1")
    assert claim.unless("") is claim


def test_wrong_names_are_refused(here, capsys):
    """With the names that exist."""
    known, _ = here
    with pytest.raises(SystemExit, match="2"):
        command.main(["tyo", *known(toy=toy(True))])
    assert "no experiment tyo; there are toy" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["toy", "--devices", "0", *known(toy=toy(True))])
    assert "--devices must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["toy", "--seed", "-1", *known(toy=toy(True))])
    assert "--seed must be at least 0, got -1" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(here, capsys, tmp_path):
    """Before an experiment whose findings would be lost."""
    known, _ = here
    known(toy=toy(True))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        command.main(["toy", "--out", str(tmp_path / "file")])
    told = " ".join(capsys.readouterr().err.split())
    assert "--out must be a folder that can be written, got [Errno 17]" in told


def test_an_interrupt_ends_the_run(here, capsys):
    """One line, the exit status of shells, nothing written, nothing more run."""
    known, folder = here
    module = toy(True)

    def run(settings, progress):
        raise KeyboardInterrupt

    module.run = run
    assert command.main(["all", *known(first=module, second=toy(True))]) == 130
    out, errors = capsys.readouterr()
    assert out.rstrip().endswith("interrupted: first has not been finished.")
    assert (errors, list(folder.iterdir())) == ("", [])


def test_ctrl_c_ends_the_program(tmp_path):
    """However JAX's threads are busy just then."""
    running = subprocess.Popen(
        [*COMMAND, "toy_model_parallel", "--quick", "--out", str(tmp_path)],
        cwd=Path(command.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        assert running.stdout.readline().startswith("toy_model_parallel: ")
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=240)
    assert (running.returncode, without_notices(errors)) == (130, "")
    assert output.endswith("interrupted: toy_model_parallel has not been finished.\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AssertionError(), "is here; try --device cpu"),
        (RuntimeError("not known"), "is here (not known); try --device cpu"),
    ],
)
def test_a_platform_that_is_not_here(here, monkeypatch, capsys, error, told):
    """A sentence, and the exit status of a wrong call."""
    known, folder = here

    def devices():
        raise error

    monkeypatch.setattr(command.jax, "devices", devices)
    with pytest.raises(SystemExit, match="2"):
        command.main(["toy", "--device", "cuda", *known(toy=toy(True))])
    assert told in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_the_page_stands_without_results(tmp_path):
    """An empty folder gives an empty page, not an error."""
    assert "0 of 0 experiments" in _report.write(tmp_path).read_text()
