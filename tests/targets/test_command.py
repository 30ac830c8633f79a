"""`python -m jdist.targets`: its table, its files, its exit status."""

import json

import pytest

from jdist import targets
from jdist.targets import __main__ as command
from jdist.targets import search

MODULE = """
import jax, jax.numpy as jnp

def job(hardware, batch=8):
    sharding = jax.NamedSharding(hardware.mesh({"data": hardware.chips}), jax.P("data"))
    x = jax.ShapeDtypeStruct((batch, 16), jnp.float32, sharding=sharding)
    return lambda x: x.sum() * x, x

def broken(hardware):
    raise KeyError("mine")

thing = 3
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A folder with a module of jobs, and hardware of a name that there is not."""
    (tmp_path / "own_jobs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    chip = targets.Chip("small", "cpu", 100_000, 1e9, {"float32": 1e10}, 1e9)

    def made(name):
        return targets.Hardware(chip, (int(name.partition(":")[2]),))

    monkeypatch.setattr(command, "target", made)
    monkeypatch.setattr(search, "target", made)
    return tmp_path


def test_a_file_that_cannot_be_written(small, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["own_jobs:job", "--target", "small:1", "--json", "none/found"])
    told = " ".join(capsys.readouterr().err.split())
    assert "argument --json: must be a file in a folder that exists, not no" in told


def test_what_fits(small, capsys):
    """A table for each target, a record; exit status 0."""
    arguments = ["own_jobs:job", "--target", "small:1", "small:4"]
    assert command.main([*arguments, "--json", "found.json"]) == 0
    shown = capsys.readouterr().out
    for text in ("small:1: fits", "small:4: fits", "estimate", "all-reduce"):
        assert text in shown
    records = json.loads((small / "found.json").read_text())
    assert [(each["label"], each["fits"]) for each in records] == [
        ("small:1", True),
        ("small:4", True),
    ]


def test_what_does_not_fit(small, capsys):
    """Exit status 1, and the bytes that it wants."""
    assert command.main(["own_jobs:job", "--target", "small:1", "--batch", "4000"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "KiB of each" in shown
    assert "DOES NOT FIT" in shown


def test_the_largest_batch(small, capsys):
    """Each that was tried has its line, and the best its table."""
    assert command.main(["own_jobs:job", "--target", "small:4", "--largest-batch"]) == 0
    shown = capsys.readouterr().out
    assert "small:4, batch 4: fits" in shown
    assert "does not fit: It wants" in shown
    assert "largest batch that fits small:4: " in shown


def test_the_smallest_slice(small, capsys, monkeypatch):
    """Or none, which is exit status 1."""
    monkeypatch.setattr(search, "CHIPS", {"small": None})
    monkeypatch.setitem(search.SLICES, "small", "1 2 4 8")
    arguments = ["own_jobs:job", "--target", "small:1", "--smallest-slice", "--batch"]
    assert command.main([*arguments, "2400"]) == 0
    assert "smallest on which it fits: small:4" in capsys.readouterr().out
    assert command.main([*arguments, "24000"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["own_jobs:thing", "--target", "small:1"], 2, "must be a function of the"),
        (["own_jobs:none", "--target", "small:1"], 2, "does not define"),
        (["no_jobs:job", "--target", "small:1"], 2, "which does not exist"),
        (["own_jobs:job", "--target", "small:99"], 2, "needs 99 CPU devices"),
        (["own_jobs:broken", "--target", "small:1"], 4, "raised KeyError"),
    ],
)
def test_wrong_calls(small, capsys, arguments, status, message):
    """Are told in words; a user's own error with its traceback."""
    assert command.main(arguments) == status
    told = " ".join(capsys.readouterr().err.split())
    assert message in told
    if status == 4:
        assert "Traceback" in told


def test_the_names_of_hardware_are_checked(capsys):
    """By `target`, which the other tests replace."""
    assert command.main(["jdist.optim:sgd", "--target", "v9:2x2"]) == 2
    assert "must be of a known chip" in capsys.readouterr().err
