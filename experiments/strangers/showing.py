"""The verdicts as tables, as a picture and as a page."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from rich.table import Table

from experiments.strangers.problem import OPTIONS, SETTINGS
from experiments.strangers.stranger import Finding
from experiments.strangers.trial import Verdict

STYLES = {
    "right": ("green", "#b7e1c0"),
    "wrong": ("red", "#f2b8b5"),
    "no step": ("yellow", "#f7e3a1"),
    "not judged": ("yellow", "#ffffff"),
    "refused": ("yellow", "#e3d3ef"),
    "not offered": ("dim", "#eeeeee"),
}
"""Colours of each verdict, on the terminal and in the picture."""

WORDS = 60
"""The most characters of a refusal."""


def apart(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """The verdicts by the kind of settings, of the uses that have one of its kind."""
    kinds = {"Verdicts": SETTINGS, "Verdicts with options": OPTIONS}
    chosen = {
        kind: [
            replace(verdict, findings=own)
            for verdict in verdicts
            if (own := [f for f in verdict.findings if f.setting in settings])
            and any(f.verdict != "not offered" for f in own)
        ]
        for kind, settings in kinds.items()
    }
    return {kind: own for kind, own in chosen.items() if own}


def rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """A table with a row for each use."""
    settings = [finding.setting for finding in verdicts[0].findings]
    header = ["stranger", "used with", *settings, "verdict", "lines"]
    return [
        header,
        *(
            [
                verdict.use.stranger,
                verdict.use.way,
                *map(str, verdict.findings),
                verdict.word,
                str(verdict.lines),
            ]
            for verdict in verdicts
        ),
    ]


def claims(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """A table of each use's claim and its documentation."""
    header = ["stranger", "used with", "claims to give", "what it says", "where"]
    uses = [verdict.use for verdict in verdicts]
    return [
        header,
        *([u.stranger, u.way, u.claim, u.documented, u.link] for u in uses),
    ]


def wrong(
    verdicts: Sequence[Verdict], name: Callable[[Verdict], str] | None = None
) -> list[list[str]]:
    """A table of the wrong gradients, with the settings and the trainers' uses.

    `name` gives the words for a use; None for the stranger and how it is used.
    """
    name = name or _name
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        settings: dict[str, list[str]] = {}
        for f in verdict.findings:
            if f.verdict in ("wrong", "no step", "refused"):
                told = f.rule or textwrap.shorten(f.why, WORDS, placeholder=" ...")
                settings.setdefault(told, []).append(f.setting)
        for rule, where in settings.items():
            uses = found.setdefault((rule, ", ".join(where)), [])
            uses.append(name(verdict))
    header = ["what it gives", "settings", "used with"]
    return [header, *([*key, "; ".join(uses)] for key, uses in found.items())]


def table(verdicts: Sequence[Verdict]) -> Table:
    """A table for the terminal, in 80 columns."""
    shown = Table("stranger", box=None, pad_edge=False, header_style="bold")
    for finding in verdicts[0].findings:
        shown.add_column(finding.setting, justify="right", min_width=7)
    for verdict in verdicts:
        cells = [f"[{STYLES[f.verdict][0]}]{_short(f)}[/]" for f in verdict.findings]
        shown.add_row(_name(verdict), *cells)
    return shown


def picture(verdicts: Sequence[Verdict]) -> Figure:
    """A picture with a cell for each use and setting."""
    kinds = list(STYLES)
    settings = [finding.setting for finding in verdicts[0].findings]
    grid = [[kinds.index(f.verdict) for f in v.findings] for v in verdicts]
    figure, axes = plt.subplots(figsize=(13, 0.42 * len(verdicts) + 1.2))
    colours = ListedColormap([STYLES[kind][1] for kind in kinds])
    axes.imshow(grid, cmap=colours, vmin=-0.5, vmax=len(kinds) - 0.5, aspect="auto")
    for y, verdict in enumerate(verdicts):
        for x, finding in enumerate(verdict.findings):
            axes.text(x, y, _short(finding), ha="center", va="center", fontsize=7)
    names = list(map(_name, verdicts))
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(len(settings)), settings, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _name(verdict: Verdict) -> str:
    return f"{verdict.use.stranger}: {verdict.use.way}"


def _short(finding: Finding) -> str:
    if finding.verdict == "not offered":
        return "–"
    return str(finding).removesuffix(" off")


def page(
    path: Path, verdicts: Sequence[Verdict], versions: Mapping[str, str], command: str
) -> None:
    """Writes the tables as Markdown.

    Args:
      path: The path of the file.
      verdicts: The verdicts.
      versions: Versions of the packages on trial.
      command: The command that makes this page.
    """
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    numbers = {_name(verdict): str(i) for i, verdict in enumerate(verdicts, 1)}

    def number(verdict: Verdict) -> str:
        return numbers[_name(verdict)]

    described = [[number(v), v.use.claim, _linked(v)] for v in verdicts]
    header = ["", "claims to give", "what its documentation says"]
    parts = [f"`{command}`, with {named}."]
    for own in apart(verdicts).values():
        first, *body = rows(own)
        each = [
            ["", *first],
            *([number(v), *row] for v, row in zip(own, body, strict=True)),
        ]
        # The verdict's word follows from the cells before it.
        parts.append(_markdown([[*row[:-2], row[-1]] for row in each]))
    parts += [_markdown([header, *described]), _markdown(wrong(verdicts, number))]
    path.write_text("\n\n".join(parts) + "\n")


def _linked(verdict: Verdict) -> str:
    return f"{verdict.use.documented} [source]({verdict.use.link})"


def _markdown(table: Sequence[Sequence[str]]) -> str:
    header, *body = table
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
