"""The verdicts as a table, as a picture and as a page for each exhibit."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from rich.table import Table

from experiments.museum.judging import Finding, Verdict

WIDTH = 200
"""Characters of a line of a report on a page, before it is abridged."""


def rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """A table with a row for each exhibit."""
    header = ["exhibit", "what goes wrong", "caught", "named", "fixed form passes"]
    header += ["lines", "seconds"]
    return [
        header,
        *(
            [
                each.exhibit.label,
                each.exhibit.title,
                *map(_word, (each.caught, each.named, each.passes)),
                str(each.exhibit.glue),
                f"{each.seconds:.0f}",
            ]
            for each in verdicts
        ),
    ]


def _word(found: bool) -> str:
    return "yes" if found else "no"


def table(verdicts: Sequence[Verdict]) -> Table:
    """A table for the terminal, in 80 columns."""
    shown = Table("exhibit", box=None, pad_edge=False, header_style="bold")
    for name in ("caught", "named", "passes", "lines", "s"):
        shown.add_column(name, justify="right")
    for label, _, *words, lines, seconds in rows(verdicts)[1:]:
        marks = [f"[{'green' if w == 'yes' else 'bold red'}]{w}[/]" for w in words]
        shown.add_row(label, *marks, lines, seconds)
    return shown


def picture(verdicts: Sequence[Verdict]) -> Figure:
    """A picture with a row of three cells for each exhibit."""
    grid = [[each.caught, each.named, each.passes] for each in verdicts]
    figure, axes = plt.subplots(figsize=(6, 0.2 * len(verdicts) + 1))
    colours = ListedColormap(["#f2b8b5", "#b7e1c0"])
    axes.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(3), ["caught", "named", "fixed passes"], fontsize=8)
    labels = [each.exhibit.label for each in verdicts]
    axes.set_yticks(range(len(verdicts)), labels, fontsize=6)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def file(verdict: Verdict) -> str:
    """The name of an exhibit's page."""
    return f"{verdict.exhibit.label.replace('/', '-')}.md"


def index(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Writes the table, with links to the pages.

    Args:
      path: The path of the file.
      verdicts: The verdicts.
    """
    header, *body = rows(verdicts)
    linked = [
        [f"[{row[0]}]({file(each)})", *row[1:]]
        for row, each in zip(body, verdicts, strict=True)
    ]
    lines = [header, ["---"] * len(header), *linked]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    path.write_text(f"# Published silent bugs, and what the judge says\n\n{text}\n")


def page(path: Path, verdict: Verdict) -> None:
    """Writes the page of an exhibit.

    Args:
      path: The path of the file.
      verdict: The verdict on it.
    """
    shown = verdict.exhibit
    expected = " and ".join(f"`{each.strip()}`" for each in shown.expected)
    parts = [
        f"# {shown.title}",
        shown.story,
        f"Published: <{shown.thread}>",
        f"Claimed: {shown.claim}",
        f"```python\n{shown.source('buggy')}\n```",
        "Fixed:",
        f"```python\n{shown.source('fixed')}\n```",
        "The trainer around both:",
        f"```python\n{shown.trainer_source}\n```",
        f"Expected in one line of the report: {expected}.",
        f"## The buggy form: {_outcome(verdict)}",
        _report(verdict.buggy),
        f"## The fixed form: {'passes' if verdict.passes else 'DOES NOT PASS'}",
        _report(verdict.fixed),
        f"Lines that a user writes: {shown.glue}. Seconds: {verdict.seconds:.0f}.",
        shown.known,
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n")


def _outcome(verdict: Verdict) -> str:
    caught = "caught" if verdict.caught else "NOT CAUGHT"
    if verdict.confused:
        return f"{caught}, place not told from {', '.join(verdict.confused)}"
    return f"{caught}, place {'named' if verdict.named else 'not named'}"


def _report(finding: Finding) -> str:
    cut = (x if len(x) <= WIDTH else f"{x[:WIDTH]} ..." for x in finding.lines)
    return "```text\n" + "\n".join(cut) + "\n```"
