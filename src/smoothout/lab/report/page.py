"""One self-contained HTML page: no request leaves it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jinja2
from markupsafe import Markup, escape

MOST_WITHOUT_CONTENTS = 8  # sections, of which a page needs no list


def with_code(text: str) -> Markup:
    """Escaped, and what stands between backticks set as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `tone` is "good" or "bad" where the figures show a difference for better or worse."""

    text: str
    tone: Literal["", "good", "bad", "faint"] = ""

    def __str__(self) -> str:
        return f"**{self.text}**" if self.tone in ("good", "bad") else self.text


NOTHING = Cell("–", "faint")


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    starts_block: bool = False


@dataclass(frozen=True)
class Table:
    """Figures, or sentences (`prose`), whose cells are wrapped."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    prose: bool = False

    def to_markdown(self) -> str:
        """The same table for a text file."""
        lines = [self.header, tuple("---" for _ in self.header), *(row.cells for row in self.rows)]
        return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


@dataclass(frozen=True)
class Figure:
    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    heading: str
    paragraphs: tuple[str, ...] = ()
    table: Table | None = None
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Page:
    """A title, an optional lesson on flatness, sections, and at the foot where it all comes from."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    foot: tuple[tuple[str, str], ...] = field(default=())
    lesson: bool = False

    def to_html(self) -> str:
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        environment.filters["with_code"] = with_code
        content = {name: getattr(self, name) for name in ("title", "lead", "sections", "foot", "lesson")}
        return environment.get_template("page.html.j2").render(
            content, has_contents=len(self.sections) > MOST_WITHOUT_CONTENTS
        )
