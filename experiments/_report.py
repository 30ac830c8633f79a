"""One self-contained HTML page over all results in a folder.

It is made from the JSON and PNG files alone, so that experiments that ran at different
times share a page. Pictures are inlined, so that it needs no network.
"""

import base64
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --part: #9a6700;
  --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --part: #d29922;
  --bad: #f85149; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem;
  padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem;
  border-top: 1px solid var(--line); padding-top: 1.5rem; }
.proved { font-weight: 600; } .good { color: var(--good); }
.part { color: var(--part); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
figure { margin: 1rem 0; } img { width: 100%; max-width: 62rem; height: auto;
  background: white; border-radius: 6px; }
figcaption, footer, details { font-size: .875rem; opacity: .8; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
"""


def write(folder: Path) -> Path:
    """Writes `report.html` from every result in the folder; returns its path."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    kinds = [_kind(record) for record in records]
    held, part = len(kinds) - kinds.count("bad"), kinds.count("part")
    claims = [claim for record in records for claim in record["claims"]]
    left = sum(claim["holds"] is None for claim in claims)
    sections = "\n".join(_section(folder, record) for record in records)
    contents = "\n".join(map(_entry, records))
    page = folder / "report.html"
    page.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>jdist: experiments</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body>
<h1>jdist: experiments</h1>
<p>{held} of {len(records)} experiments hold, {part} of them in part. Of {len(claims)}
claims {left} were not judged.</p>
<nav><ul>
{contents}
</ul></nav>
{sections}
</body></html>
"""
    )
    return page


def _entry(record: dict[str, Any]) -> str:
    """A line of the table of contents."""
    name, kind = escape(record["name"]), _kind(record)
    verdict = {"good": "holds", "part": "holds in part", "bad": "does not hold"}[kind]
    told = f'<span class="{kind}">{verdict}</span>{_form(record)}'
    return f'<li><a href="#{name}">{name}</a>: {told}</li>'


def _kind(record: dict[str, Any]) -> str:
    """The class of an outcome: good only if every claim was judged."""
    if not record["holds"]:
        return "bad"
    return "part" if any(x["holds"] is None for x in record["claims"]) else "good"


def _form(record: dict[str, Any]) -> str:
    """The suffix of a shorter form, which proves less than the full one."""
    return ", quick form" if record["settings"]["quick"] else ""


def _section(folder: Path, record: dict[str, Any]) -> str:
    kind = _kind(record)
    name = escape(record["name"])
    outcome = record.get("outcome", "Written in an older form.")
    form = "quick form" if record["settings"]["quick"] else "full form"
    claims = [("", "claim", "measured")] + [
        (_mark(claim["holds"]), claim["text"], _told(claim))
        for claim in record["claims"]
    ]
    parts = [
        f'<h2 id="{name}">{name}{_form(record)}</h2><p>{escape(record["summary"])}</p>',
        f'<p class="proved {kind}">{escape(outcome)}</p>',
        _table("Claims", claims),
        *(_table(title, rows) for title, rows in record["tables"].items()),
        *(_figure(folder, picture) for picture in record["pictures"]),
        *(f"<p>Note: {escape(note)}</p>" for note in record["notes"]),
        f"<details><summary>{form}, {record['seconds']:.0f} s</summary>"
        f"{_table('', [('where', ''), *record['environment'].items()])}</details>",
    ]
    return "\n".join(parts)


def _mark(holds: bool | None) -> str:
    return "–" if holds is None else "✓" if holds else "✗"


def _told(claim: dict[str, Any]) -> str:
    if claim["holds"] is not None:
        return str(claim["measured"])
    measured = f"; measured: {claim['measured']}" if claim["measured"] else ""
    return f"not judged: {claim['why_not']}{measured}"


def _table(title: str, rows: Iterable[Iterable[Any]]) -> str:
    header, *body = ([escape(str(cell)) for cell in row] for row in rows)
    head = "".join(f"<th>{cell}</th>" for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body
    )
    for mark, kind in (("✓", "good"), ("✗", "bad")):
        lines = lines.replace(f"<td>{mark}</td>", f'<td class="{kind}">{mark}</td>')
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _figure(folder: Path, picture: dict[str, str]) -> str:
    data = base64.b64encode((folder / picture["file"]).read_bytes()).decode()
    caption = escape(picture["caption"])
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
