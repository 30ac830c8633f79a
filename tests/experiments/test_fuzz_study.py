"""What the study of layouts plants is there, and its tables say what was found."""

import inspect
from itertools import product

import pytest

from experiments import _planted_layouts as planting
from experiments import fuzz_study
from experiments.fuzz_study import Found
from jdist import verify


@pytest.mark.parametrize("fault", planting.FAULTS)
def test_a_fault_is_planted_where_its_axes_meet(fault):
    """And nowhere else; the trainer knows it by its name."""
    own = planting.FAULTS[fault]
    for others, moved in product((0, -1), product((0, -1), repeat=len(own))):
        at = {
            **dict.fromkeys(planting.AXES, others),
            **dict(zip(own, moved, strict=True)),
        }
        layout = {axis: planting.AXES[axis][place] for axis, place in at.items()}
        assert planting.planted(layout, fault) == all(moved)
        assert not planting.planted(layout, None)
    named = inspect.getsource(planting).count(f'"{fault}"')
    assert named >= 2


def test_eight_devices_and_whole_micro_batches_are_valid():
    layout = {axis: values[0] for axis, values in planting.AXES.items()}
    assert planting.valid({**layout, "tp": 2, "cp": 2, "pp": 2, "micro": 3})
    assert not planting.valid({**layout, "tp": 2, "cp": 2, "dp": 3})
    assert planting.valid({**layout, "dp": 3, "micro": 2})
    assert not planting.valid({**layout, "dp": 3, "micro": 3})


FOUND = [
    Found("one", ("dp",), 2, 2, 11, 20, 9.0, (("dp",),), 0),
    Found("one", ("dp",), 3, 3, 30, 40, 19.0, (("dp",), ("dp", "tp")), 1),
    Found("two", ("cp", "tie"), 2, 0, 11, 11, 5.0, (), 3),
    Found("two", ("cp", "tie"), 3, 4, 30, 41, 21.0, (("tie", "cp"),), 0),
]
DRAWS = {"one": 2.0, "two": 4.25}


def test_only_the_planted_axes_are_exact():
    assert [each.exact for each in FOUND] == [True, False, False, True]


def test_the_tables_have_each_search():
    header, *rows = fuzz_study.listed(FOUND, DRAWS)
    assert [len(row) for row in rows] == [len(header)] * 2
    assert rows[0][3:] == ["2 of 11", "20", "just these", "3 of 30", "40", "dp; dp, tp"]
    assert rows[1] == [
        "two", "cp, tie", "4.2", "none", "11", "", "4 of 30", "41", "just these"
    ]  # fmt: skip
    header, *rows = fuzz_study.counted(FOUND, DRAWS)
    assert rows[2] == ["2", "2", "1", "0", "0", "", "4.2, 4", "11.0, 11", "5.0, 5"]
    assert rows[1][3:5] == ["1", "0"]


def test_random_draws_are_the_mean_until_a_layout_has_the_fault():
    """Of K layouts among N, drawn without putting back: (N + 1) / (K + 1)."""
    axes = {a: each[:1] for a, each in planting.AXES.items()}
    bench = fuzz_study.Bench({**axes, "cp": (1, 2), "mask": (False, True)}, 0)
    assert bench.random_draws("tokens of one shard") == 5 / 2


def test_an_interrupted_study_goes_on(tmp_path, monkeypatch):
    """Verdicts are read again, unless the code has changed since."""
    judged = []

    def judge(self, layout):
        judged.append(layout)
        return verify.Verdict(layout, "right")

    monkeypatch.setattr(fuzz_study.LayoutJudge, "judge", judge)
    axes = {a: each[: 1 + (a in ("dp", "mask"))] for a, each in planting.AXES.items()}

    def searched(folder):
        judged.clear()
        found = fuzz_study.Bench(axes, 0, folder).search("", 2)
        assert found.judged == 4
        return len(judged)

    assert [searched(tmp_path), searched(tmp_path), searched(None)] == [4, 0, 4]
    monkeypatch.setattr(fuzz_study, "_code", lambda: "other")
    assert [searched(tmp_path), searched(tmp_path)] == [4, 0]
