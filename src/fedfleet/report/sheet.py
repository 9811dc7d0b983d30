"""The sheet that every report is written on: the template with its style and script, and the files that are left."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedfleet.files.writing import own_folder, replacing
from fedfleet.report.picture import Picture
from fedfleet.simulator.errors import ConfigError, one_line

HERE = Path(__file__).parent
FIGURES = "figures"


class Heat(NamedTuple):
    """A cell of a table and its share of the row, 0 to 1, which colours it."""

    text: str
    share: float


class Grid(NamedTuple):
    """A table: cells of the head, rows whose first cell is their heading, a sentence below, and a heading if there are several."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Heat]]
    caption: str = ""
    title: str = ""
    words: bool = False  # cells are words rather than numbers
    folded: bool = False  # it is there to be opened

    @property
    def heated(self) -> bool:
        """Whether there is a coloured cell."""
        return any(isinstance(cell, Heat) for row in self.rows for cell in row)


class Block(NamedTuple):
    """A section of the page: a heading, tables, figures."""

    title: str
    tables: list[Grid]
    pictures: list[Picture]

    @property
    def folded(self) -> list[Picture]:
        """The figures that are there to be opened."""
        return [picture for picture in self.pictures if picture.folded]

    @property
    def open(self) -> list[Picture]:
        """The other figures."""
        return [picture for picture in self.pictures if not picture.folded]


def blocks(
    pictures: Iterable[Picture], tables: Iterable[tuple[str, Grid | None]], *, order: Sequence[str]
) -> list[Block]:
    """Sections in this order, what it does not name after it: each with the tables and figures of its heading. No empty one."""
    by_title: dict[str, Block] = {title: Block(title, [], []) for title in order}
    for title, grid in tables:
        if grid is not None:
            by_title.setdefault(title, Block(title, [], [])).tables.append(grid)
    for picture in pictures:
        by_title.setdefault(picture.section, Block(picture.section, [], [])).pictures.append(picture)
    return [block for block in by_title.values() if block.tables or block.pictures]


def fill(*, blocks: Sequence[Block], **parts: Any) -> str:
    """The page as text, of the parts that the template names. What they hold is escaped, and no script runs but the page's own."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    charts = {picture.name: picture.chart for block in blocks for picture in block.pictures if picture.chart}
    return environment.get_template("report.html.j2").render(
        **parts,
        blocks=blocks,
        script=Markup(script),
        script_digest=digest,
        charts=Markup(_data(charts)) if charts else None,
        drawn=lambda picture: Markup(picture.svg),
        slug=_slug,
    )


def write(out: Path, html: str, pictures: Sequence[Picture]) -> Path:
    """Write `report.html`, which stands alone, and the pictures as files in `figures`; return the page's path.

    Whoever has the page open never sees half of it. Raises ConfigError where the folder cannot be written.
    """
    target = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = own_folder(out / FIGURES)
        for picture in pictures:
            with replacing(folder / f"{picture.name}.png") as scratch:
                scratch.write_bytes(picture.png)
        with replacing(target) as scratch:
            scratch.write_text(html, encoding="utf-8")
    except OSError as e:
        raise ConfigError(
            f"{out}: cannot be written ({one_line(e.strerror or e)}): give a folder you may write to"
        ) from None
    return target


def _data(charts: dict[str, Any]) -> str:
    """Charts as JSON that holds nothing that could end the element it stands in; lists of numbers that recur are told once."""
    pool: dict[tuple[float, ...], int] = {}

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(item) for key, item in value.items()}
        if isinstance(value, tuple):  # numbers
            return pool.setdefault(value, len(pool))
        return [kept(item) for item in value] if isinstance(value, list) else value

    told = {"charts": kept(charts), "pool": [list(numbers) for numbers in pool]}
    text = json.dumps(told, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _slug(title: str) -> str:
    return "at-" + "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in title.lower())
