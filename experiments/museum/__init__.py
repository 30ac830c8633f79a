"""Does the judge catch the published silent bugs of trainers, and name their places,
without condemning the mended ones?

Each exhibit is a bug that was published as an issue or a pull request of a trainer,
re-created as a small program in two forms, buggy and fixed. The judge is asked about
both. Where the bug is and what is wrong there was written down before, as strings that
its report has to contain, and that no other report of the museum may contain.

Each exhibit has a module in a folder of its kind; `exhibit.py` says what it consists
of. Each gets a page of its own, which is made of the program's own words.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from experiments.museum import exhibit, judging, showing
from experiments.museum.judging import Verdict

__all__ = ["run"]

QUICK = (
    "pipelines/tied_ends", "accumulation/mean_of_means", "replicas/summed_again",
    "optimizers/decay_by_shape",
)  # fmt: skip
"""The exhibits of the quick form."""
SHARE = 0.9
"""The share of the exhibits whose places are to be named."""


def run(settings: Settings, progress: Progress) -> Result:
    """Asks the judge about both forms of every exhibit."""
    labels = QUICK if settings.quick else exhibit.names()
    absent = {label: lacks for label in labels if (lacks := exhibit.missing(label))}
    shown = [label for label in labels if label not in absent]
    task = progress.add_task("museum", total=len(shown))
    found = []
    for label in shown:
        progress.update(task, description=label)
        found.append(judging.verdict(exhibit.load(label)))
        progress.advance(task)
    verdicts = judging.compared(found)
    progress.console.print(showing.table(verdicts))
    return Result(
        claims=claims(verdicts, absent, settings.quick),
        pictures=[
            Picture(
                "verdicts",
                "Each exhibit: its buggy form is caught, its place is named, its fixed "
                "form passes.",
                showing.picture(verdicts),
            )
        ],
        tables={"Exhibits": showing.rows(verdicts)},
        data={"verdicts": [record(each) for each in verdicts]},
        notes=[
            "Lines are those that a user writes to have a trainer judged: the "
            "reference, its data and the call. Seconds are those of both verdicts, "
            "with what the judge measures of the reference."
        ],
        files={
            "index.md": partial(showing.index, verdicts=verdicts),
            **{
                showing.file(each): partial(showing.page, verdict=each)
                for each in verdicts
            },
        },
    )


def record(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON values."""
    shown = verdict.exhibit
    return {
        "exhibit": shown.label,
        "thread": shown.thread,
        "expected": shown.expected,
        "caught": verdict.caught,
        "named": verdict.named,
        "passes": verdict.passes,
        "confused": verdict.confused,
        "lines": shown.glue,
        "seconds": verdict.seconds,
        "buggy": verdict.buggy.lines,
        "fixed": verdict.fixed.lines,
    }


def claims(
    verdicts: Sequence[Verdict], absent: dict[str, str], quick: bool
) -> list[Claim]:
    """The claims of the museum, and those on exhibits that were left out.

    Args:
      verdicts: The verdicts on the exhibits that were shown.
      absent: The package that each other exhibit lacks.
      quick: Whether this is the quick form.
    """
    count = len(verdicts)
    condemned = [each for each in verdicts if each.fixed.failed]
    unjudged = [each for each in verdicts if not each.passes and not each.fixed.failed]
    share = "the quick form shows a few exhibits" if quick else ""
    named = _counted([each.named for each in verdicts])
    return [
        _all("every buggy form is caught", "caught", verdicts),
        Claim(
            "no fixed form is condemned",
            not condemned,
            _labels(condemned) or f"{count} of {count} are not",
            leads=True,
        ),
        Claim(
            "every fixed form is judged, and passes",
            not condemned and not unjudged,
            _labels([*condemned, *unjudged]) or f"{count} of {count}",
        ),
        Claim(
            f"the place is named in {SHARE:.0%} of the exhibits",
            sum(each.named for each in verdicts) >= SHARE * count,
            named,
            leads=True,
        ).unless(share),
        *(
            Claim(f"{label} is caught and named", None, "", f"{lacks} not installed")
            for label, lacks in absent.items()
        ),
    ]


def _all(text: str, name: str, verdicts: Sequence[Verdict]) -> Claim:
    lacking = [each for each in verdicts if not getattr(each, name)]
    measured = _counted([getattr(each, name) for each in verdicts])
    shown = f"{measured}; not {_labels(lacking)}" if lacking else measured
    return Claim(text, not lacking and bool(verdicts), shown, leads=True)


def _counted(found: Sequence[bool]) -> str:
    return f"{sum(found)} of {len(found)}"


def _labels(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(each.exhibit.label for each in verdicts)
