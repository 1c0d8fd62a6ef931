# SPDX-License-Identifier: Apache-2.0
"""The report's page: one HTML file that holds its pictures and asks the network for nothing. All text is escaped."""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

CSS = """
:root { color-scheme: light; --ink: #1a1a1a; --line: #767676; --focus: #0b5fff; }
* { box-sizing: border-box; }
body { font: 1rem/1.55 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 0 auto; max-width: 72rem;
       padding: 1rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin-top: 2.5rem; border-top: 1px solid #ccc;
     padding-top: 1.25rem; }
p, li, figcaption { max-width: 46rem; }
figure { margin: 1.25rem 0; } figure img { max-width: 100%; height: auto; border: 1px solid #ddd; }
figcaption { font-size: .95rem; margin-bottom: .4rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; white-space: nowrap; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .8rem .25rem 0; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .text { text-align: left; }
thead th { border-bottom: 2px solid var(--line); }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
a { color: #0645ad; } nav ul { columns: 16rem; padding-left: 1.2rem; }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 3px; }
.skip { position: absolute; left: -99rem; } .skip:focus { position: static; }
.verdict { border-left: .35rem solid var(--focus); padding: .3rem 0 .3rem .9rem; }
@media print { details > * { display: block; } nav { display: none; } }
"""


@dataclass(frozen=True)
class Text:
    """A paragraph; `verdict` sets it off as what the reader came for."""

    text: str
    verdict: bool = False

    def html(self) -> str:
        return f"<p{' class=verdict' if self.verdict else ''}>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Picture:
    """A PNG, the name of its file without suffix, what it shows to whoever sees it and to whoever does not."""

    png: bytes = field(repr=False)
    name: str
    caption: str
    description: str

    def html(self) -> str:
        data = base64.b64encode(self.png).decode("ascii")
        return (f'<figure id="{escape(self.name)}"><figcaption>{escape(self.caption)}</figcaption>'
                f'<img src="data:image/png;base64,{data}" alt="{escape(self.description)}"></figure>')


@dataclass(frozen=True)
class Table:
    """Rows of texts under named columns; the first column names the row. `folded` hides it until it is opened."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = []
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
            body.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
        title = escape(self.title)
        table = (f'<div class=wide role=region tabindex=0 aria-label="{title}"><table><caption>{title}</caption>'
                 f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div>")
        return f"<details><summary>{title}</summary>{table}</details>" if self.folded else table


@dataclass(frozen=True)
class Section:
    """A heading, which the contents link to, and what is under it."""

    title: str
    blocks: Sequence[Text | Picture | Table]


def page_html(title: str, summary: Sequence[Text], sections: Sequence[Section]) -> str:
    """The whole page."""
    names = [f"section-{place + 1}" for place in range(len(sections))]
    contents = "".join(f'<li><a href="#{name}">{escape(section.title)}</a></li>'
                       for name, section in zip(names, sections, strict=True))
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
             '<meta name="viewport" content="width=device-width, initial-scale=1">',
             f"<title>{escape(title)}</title><style>{CSS}</style></head><body>",
             '<a class=skip href="#main">Skip the contents</a>',
             f"<header><h1>{escape(title)}</h1>", *(text.html() for text in summary), "</header>",
             f'<nav aria-label="Contents"><ul>{contents}</ul></nav><main id="main">']
    for name, section in zip(names, sections, strict=True):
        parts.append(f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>')
        parts += [block.html() for block in section.blocks]
        parts.append("</section>")
    return "\n".join([*parts, "</main></body></html>", ""])


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all: a page that a killed run left half would look finished."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def write_report(path: str | os.PathLike[str], *, title: str, summary: Sequence[Text],
                 sections: Sequence[Section]) -> list[Path]:
    """Writes the page, and each of its pictures as a PNG beside it: report.html, report-NAME.png.

    Returns:
        The paths written, the page first.

    Raises:
        ValueError: two pictures of one name, a name that no file can have, a table's row of another length.
        OSError: where the system does not let it be written.
    """
    page = Path(path)
    pictures = [block for section in sections for block in section.blocks if isinstance(block, Picture)]
    for picture in pictures:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", picture.name):
            raise ValueError(f"name of a picture: got {picture.name!r}, expected letters, digits, '.', '_' and '-'")
    if len({picture.name for picture in pictures}) < len(pictures):
        raise ValueError(f"names of pictures: {[picture.name for picture in pictures]} has one twice")
    files = {page.with_name(f"{page.stem}-{picture.name}.png"): picture.png for picture in pictures}
    html = page_html(title, summary, sections).encode()
    for file, content in {**files, page: html}.items():
        _replace(file, content)
    return [page, *files]
