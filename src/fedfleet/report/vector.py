"""Matplotlib's SVG as an element of the page: its colours are the page's own, so that light and dark have one drawing."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree as ET

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
LARGEST = 600_000  # characters; what is larger, such as thousands of marks, is shown as PNG
SCALE = 4 / 3  # pixels of the page in a point
COLORS = {
    "#ffffff": "sheet", "#1b1e23": "text", "#30343b": "ink", "#8a8f98": "axis", "#e4e6ea": "grid", "#000000": "text",
    "#9aa1ab": "axis", "#5a606a": "ink",
    "#0072b2": "c0", "#d55e00": "c1", "#009e73": "c2", "#cc79a7": "c3", "#e69f00": "c4", "#56b4e9": "c5", "#4d4d4d": "c6",
    "#c4c7cc": "nobody",
}  # fmt: skip
"""A colour of the figures -> the page's variable."""
COLOR = re.compile("|".join(COLORS), re.IGNORECASE)
FONT = re.compile(r"font:\s*(?:(bold|[1-9]00)\s+)?([\d.]+px)[^;]*")
NUMBER = re.compile(r"-?\d+\.\d{3,}")
ID = re.compile(r"(url\(#|^#)")

ET.register_namespace("", SVG)
ET.register_namespace("xlink", XLINK)


def element(figure: Figure, name: str, title: str, caption: str) -> str | None:
    """The figure as an `<svg>` that a reader of screens is told the title and the caption of; None where it is too large.

    Its identifiers begin with `name`, which is the figure's own in its page.
    """
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)  # savefig would draw it twice
    text = buffer.getvalue()
    if len(text) > LARGEST:
        return None
    root = ET.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
        for key, value in list(parent.attrib.items()):
            parent.set(key, _mended(key.rpartition("}")[2], value, name))
    width, height = (float(root.attrib.pop(side).removesuffix("pt")) * SCALE for side in ("width", "height"))
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-label", f"{title}. {caption}")
    root.set("style", f"width: {width:.0f}px; aspect-ratio: {width:.0f} / {height:.0f}")
    return ET.tostring(root, encoding="unicode")


def _mended(key: str, value: str, name: str) -> str:
    if key == "style":
        value = FONT.sub(lambda m: f"font-size: {m[2]}" + (f"; font-weight: {m[1]}" if m[1] else ""), value)
        return COLOR.sub(lambda m: f"var(--{COLORS[m[0].lower()]})", value.replace("url(#", f"url(#{name}-"))
    if key == "id":
        return f"{name}-{value}"
    if key in ("d", "x", "y", "points"):
        return NUMBER.sub(lambda m: f"{float(m[0]):.2f}", value)  # hundredths of a point are seen by nobody
    return ID.sub(lambda m: f"{m[1]}{name}-", value) if key in ("href", "clip-path") else value
