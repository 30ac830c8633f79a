"""When two layouts fail for the same reason: by the kind of words, not by numbers."""

import pytest

from jdist.verify.fuzzing.verdict import Verdict, of_report
from jdist.verify.report import Attribution, LeafReport, OracleCheck, Report

OFF = "off by {} times the bound at [{}]: expected 0.31, got -2.5e-07"


def wrong(*problems, part=None, loss=True):
    """A verdict with these words of its leaves."""
    leaves = [
        LeafReport("trainer", f"w{n}", "float32", (3,), ratio=9 - n, problem=words)
        for n, words in enumerate(problems)
    ]
    row = LeafReport("trainer", "(loss)", "float32", (), ratio=1, cosine=1, max_ulp=0)
    if not loss:
        row = LeafReport("trainer", "(loss)", "float32", (), problem=OFF.format(3, ""))
    causes = [] if part is None else [Attribution("trainer", 1, part, "so")]
    return of_report({}, Report((*leaves, row), attributions=tuple(causes)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([OFF.format("3e+05", "1, 2")], [OFF.format(7.5, "")]),
        ([OFF.format(3, 1) + "; it is 2 times the reference"],
         [OFF.format(3, 1), OFF.format(9, 2) + "; it is -4 times the reference"]),
        ([OFF.format(3, 1) + "; it is the reference's embed"],
         ["in [0:2], " + OFF.format(3, 1) + "; it is the reference's blocks[2]/w"]),
        (["not finite: nan at [3]"], ["not finite: inf at [0, 2]"]),
        (["replicas differ over tp at [:]: tp=0 other than tp=1"],
         ["replicas differ over cp, tp at [2:4]: cp=0, tp=0 other than cp=1, tp=1"]),
        (["wrong shape: expected (3, 2), got (3,)"],
         ["wrong shape: expected (5, 7), got (8,)"]),
    ],
)  # fmt: skip
def test_numbers_places_and_other_leaves_do_not_matter(one, two):
    assert wrong(*one).reason.same(wrong(*two).reason)
    assert wrong(*two).reason.same(wrong(*one).reason)


KINDS = [
    OFF.format(3, 1),
    OFF.format(3, 1) + "; it is 2 times the reference",
    OFF.format(3, 1) + "; it is the reference's embed",
    OFF.format(3, 1) + "; it is the reference transposed",
    OFF.format(3, 1) + "; all its entries are bfloat16 numbers, as of sums in it",
    "not finite: nan at [3]",
    "replicas differ over tp at [:]: tp=0 other than tp=1",
    "wrong shape: expected (3, 2), got (3,)",
    "wrong dtype: expected float32, got bfloat16",
]


@pytest.mark.parametrize("one", range(len(KINDS)))
def test_other_kinds_of_words_are_other_reasons(one):
    for two in range(len(KINDS)):
        same = wrong(KINDS[one]).reason.same(wrong(KINDS[two]).reason)
        assert same == (one == two)


def test_a_wrong_loss_and_a_part_of_a_step_count_where_both_are_known():
    words = OFF.format(3, 1)
    backward, forward = wrong(words), wrong(words, loss=False)
    clip, update = (wrong(words, part=x) for x in ("gradient clipping", "optimizer"))
    assert not backward.reason.same(forward.reason)
    assert not clip.reason.same(update.reason)
    assert backward.reason.same(clip.reason)
    assert forward.reason.same(clip.reason)


def test_an_undecided_part_of_a_step_may_be_either():
    """Without the gradient a step may not tell which of two parts is wrong."""
    words = OFF.format(3, 1)
    undecided = wrong(words, part="gradient or optimizer update")
    for part in ("gradient", "optimizer update"):
        other = wrong(words, part=part)
        assert undecided.reason.same(other.reason)
        assert other.reason.same(undecided.reason)
    assert not undecided.reason.same(wrong(words, part="gradient clipping").reason)


def test_a_factor_in_a_step_may_be_that_of_a_norm():
    factor, off = KINDS[1], KINDS[0]
    step, gradient = wrong(factor, part="gradient"), wrong(off)
    assert step.reason.same(gradient.reason)
    assert gradient.reason.same(step.reason)
    assert step.reason.same(wrong(off, part="gradient").reason)
    assert not step.reason.same(wrong(KINDS[5], part="gradient").reason)
    assert not wrong(factor).reason.same(gradient.reason)


def test_other_outcomes_are_other_reasons():
    raised = Verdict({}, "raised", "ValueError: 3 is not 4")
    assert raised.reason.same(Verdict({}, "raised", "ValueError: 5 is not 7").reason)
    shapes = [
        Verdict({}, "raised", f"ShardingTypeError: no f32[{own}]")
        for own in ("5@fsdp,7", "11,7@tensor,3")
    ]
    assert shapes[0].reason.same(shapes[1].reason)
    assert not raised.reason.same(shapes[0].reason)
    assert not raised.reason.same(Verdict({}, "raised", "KeyError: 'x'").reason)
    assert not raised.reason.same(Verdict({}, "ended", "ValueError: 3 is not 4").reason)
    assert not raised.reason.same(wrong(OFF.format(3, 1)).reason)


def test_a_report_is_right_wrong_or_not_judged():
    row = LeafReport("trainer", "w", "float32", (3,), ratio=0.1, max_ulp=1)
    assert of_report({}, Report((row,))).outcome == "right"
    doubt = LeafReport("trainer", "w", "float32", (3,), unjudged="zero would pass")
    verdict = of_report({}, Report((row, doubt)))
    assert (verdict.outcome, verdict.why) == ("not judged", "w: zero would pass")
    assert not verdict.fails
    slopes = OracleCheck(1.0, 2.0, 0.1)
    verdict = of_report({}, Report((row,), slopes))
    assert verdict.outcome == "not judged"
    assert verdict.why.startswith("oracle WRONG: slope 1 by differentiation")
    assert of_report({}, Report(())).outcome == "not judged"
    assert wrong(KINDS[1]).why == f"w0: {KINDS[1]}"
    assert wrong(KINDS[1], part="gradient").why == "step 1, wrong gradient: so"
