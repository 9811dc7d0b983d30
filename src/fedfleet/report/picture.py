"""A figure of a report: a PNG for a file, the same as SVG for the page, and perhaps the numbers of a chart that can be zoomed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure: `name` is its file name without .png, `caption` says what one sees, `png` holds the file's bytes, and `section` is
    the heading of the page below which it stands; ``folded``, it is there to be opened.

    `svg` is an element in the page's colours, see ``vector``, or None where it would be too large; `chart` what the page's script
    draws in its place, see ``charts``.
    """

    name: str
    title: str
    caption: str
    png: bytes
    section: str = "Learning"
    folded: bool = False
    svg: str | None = None
    chart: Mapping[str, Any] | None = None

    @property
    def url(self) -> str:
        """The picture itself as a data URL."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels of the page: half the PNG's own, which is drawn for fine screens."""
        width, height = (int.from_bytes(self.png[at : at + 4], "big") for at in (16, 20))  # the IHDR chunk
        return width // 2, height // 2
