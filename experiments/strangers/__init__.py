"""Do other packages' trainers take the step that they claim, where micro-batches,
sequences and weights differ in size; and where not, what do they take instead?

Each trainer is used as its documentation writes it, on one small model, for one
optimizer step in nine settings. What it shows, the gradient or the parameters after the
step, is compared by `verify.compare` with the weighted gradient that it claims. A
wrong gradient is compared with those of the usual mistakes, so that its name is proved
as well.

Each stranger has a module here; `trial.TRAINERS` lists them. Those that are not
installed are named, and the others are judged.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from experiments.strangers import problem, showing, trial
from experiments.strangers.problem import MEAN_OF_MEANS, OVER_ALL, Reference, Step
from experiments.strangers.trial import INSTALL, TRAINERS, Verdict
from jdist import verify

__all__ = ["run"]

COMMAND = "python -m experiments strangers"
QUICK = ("equal", "padded", "short end")
"""The settings of the quick form."""


def run(settings: Settings, progress: Progress) -> Result:
    """Tries all installed strangers; the quick form only those without torch."""
    steps = problem.steps(settings.seed)
    if settings.quick:
        steps = [step for step in steps if step.setting in QUICK]
    left = left_out(settings.quick)
    present = [name for name in TRAINERS if name not in left]
    task = progress.add_task("strangers", total=len(present))

    def advance(name: str) -> None:
        progress.update(task, description=name, advance=1)

    verdicts = list(trial.tried(present, steps, advance))
    apart = showing.apart(verdicts)
    for own in apart.values():
        progress.console.print(showing.table(own))
    command = f"{COMMAND} --quick" if settings.quick else COMMAND
    versions = trial.versions()
    return Result(
        claims=claims(verdicts, steps, left, problem.check_oracle(steps[1])),
        pictures=[
            Picture(
                "verdicts",
                "Each use of each stranger in each setting. A factor is that of the "
                "whole gradient; a percentage is the distance from the claimed "
                "gradient in the 2-norm.",
                showing.picture(verdicts),
            )
        ],
        tables={
            **{name: showing.rows(own) for name, own in apart.items()},
            "What is claimed, and what is said": showing.claims(verdicts),
            "What else they give": showing.wrong(verdicts),
        },
        data={
            "versions": versions,
            "settings": problem.SETTINGS | problem.OPTIONS,
            "verdicts": [record(verdict) for verdict in verdicts],
        },
        notes=[
            "Lines are those that read the gradient or the parameters out and name "
            "them; the call of `verify.compare` is one more."
        ],
        files={
            "found.md": partial(
                showing.page, verdicts=verdicts, versions=versions, command=command
            )
        },
    )


def left_out(quick: bool) -> dict[str, str]:
    """The strangers that are not tried, and why.

    Args:
      quick: Whether this is the quick form.
    """
    reasons = {}
    for name, packages in TRAINERS.items():
        if missing := trial.absent(name):
            reasons[name] = f"{', '.join(missing)} not installed: {INSTALL}"
        elif quick and "torch" in packages:
            reasons[name] = "the quick form leaves out what needs torch"
    return reasons


def record(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON values."""
    use = verdict.use
    return {
        "stranger": use.stranger,
        "way": use.way,
        "claim": use.claim,
        "documented": use.documented,
        "link": use.link,
        "lines": verdict.lines,
        "verdict": verdict.word,
        "findings": [asdict(finding) for finding in verdict.findings],
    }


def claims(
    verdicts: Sequence[Verdict],
    steps: Sequence[Step],
    left: dict[str, str],
    oracle: verify.Report,
) -> list[Claim]:
    """The claims of the trial, and those on strangers that were left out.

    Args:
      verdicts: The verdicts on all tried uses.
      steps: The steps that they took.
      left: Strangers that were left out, and why.
      oracle: The report on the reference against finite differences.
    """
    found = [finding for verdict in verdicts for finding in verdict.judged]
    wrong = [f for f in found if f.verdict != "right"]
    named = [f for f in wrong if f.rule]
    strangers = dict.fromkeys(verdict.use.stranger for verdict in verdicts)
    fair = [name for name in strangers if right_when_equal(name, verdicts)]
    remedies = [f for v in verdicts if v.use.remedy for f in v.judged]
    mended = [f for f in remedies if f.verdict == "right"]
    seen, unequal = condemned(steps)
    return [
        Claim(
            "every gradient that is not the claimed one is named, to rounding",
            len(named) == len(wrong),
            f"{len(named)} of {len(wrong)}; {len(found)} judged",
            leads=True,
        ),
        Claim(
            "each stranger is right where all parts are equal, in some use",
            len(fair) == len(strangers),
            f"{len(fair)} of {len(strangers)}",
            leads=True,
        ),
        Claim(
            "divided by the whole step's tokens, they are right in every setting",
            len(mended) == len(remedies) and bool(remedies),
            f"{len(mended)} of {len(remedies)}",
        ),
        Claim(
            "the data tell the mean of means from the mean wherever parts differ",
            seen == unequal and bool(unequal),
            ", ".join(seen),
        ),
        Claim(
            "the reference is the derivative of its loss",
            oracle.ok,
            str(oracle.oracle),
        ),
        *(
            Claim(f"{name} takes the step that it claims", None, "", why)
            for name, why in left.items()
        ),
    ]


def right_when_equal(stranger: str, verdicts: Sequence[Verdict]) -> bool:
    """Whether some use of a stranger is right if all parts are equal."""
    return any(
        finding.setting == "equal" and finding.verdict == "right"
        for verdict in verdicts
        if verdict.use.stranger == stranger
        for finding in verdict.findings
    )


def condemned(steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """The settings in which the usual mistake is seen, and those in which parts differ.

    The mistake is the mean of means; if the data end early, it is the division by the
    number of micro-batches of a full step.
    """
    seen, steps = [], [step for step in steps if step.setting in problem.SETTINGS]
    for step in steps:
        reference = Reference(step)
        rule = OVER_ALL if step.setting == "short end" else MEAN_OF_MEANS
        mistaken = reference.of(reference.rules()[rule])
        report = verify.compare(
            reference.gradient, mistaken, reference.terms, reference.scale
        )
        if not report.ok:
            seen.append(step.setting)
    return seen, [step.setting for step in steps if step.setting != "equal"]
