"""Text in files, which is UTF-8; names that look alike; and JSON of which nothing is given twice."""

from __future__ import annotations

import codecs
import json
import unicodedata
from typing import Any

MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "UTF-8": (codecs.BOM_UTF8,),
}
"""How a file begins that says its encoding; that of UTF-32 begins as that of UTF-16 does."""
LOOKED = 4096  # bytes of a file without such a mark that are looked through for zeros, of which text has none


JOINERS = "\u200c\u200d"
"""Invisible letters that change what is seen beside them."""
VARIANTS = range(0xFE00, 0xFE10)
"""Letters that say how the one before them is drawn."""


def as_seen(name: str) -> str:
    """Return what a reader sees of a name, the same for two that look alike: no blanks at ends, one within, nothing invisible."""
    if name.isascii() and name.isprintable():
        return " ".join(name.split())
    shown = (c for c in unicodedata.normalize("NFKC", name) if c in JOINERS or c.isspace() or not _invisible(c))
    return " ".join("".join(shown).split())


def _invisible(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cf") or ord(letter) in VARIANTS


class OtherEncoding(ValueError):
    """A file whose text is in another encoding; one line that says which, and the fix."""


def check_encoding(data: bytes) -> None:
    """Refuse a file that begins like this where its text is UTF-16 or UTF-32, with a mark or without. Raises OtherEncoding."""
    for other in ("UTF-32", "UTF-16"):
        if data.startswith(MARKS[other]) or (other == "UTF-16" and 4 * data[:LOOKED].count(0) > len(data[:LOOKED])):
            raise OtherEncoding(f"its text is {other}: write it again as UTF-8")


def decoded(data: bytes, encoding: str = "utf-8") -> str:
    """Return text; a mark that says UTF-8 is no part of it. Raises OtherEncoding."""
    check_encoding(data)
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode(encoding)
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        wrong = f"byte 0x{data[e.start]:02x} in line {line} is no {encoding.upper()}"
        raise OtherEncoding(f"{wrong}: write it again as UTF-8") from None


def parsed_json(data: bytes) -> Any:
    """Return what JSON in UTF-8 says. Raises ValueError, also for a key that is given twice, of which JSON keeps the last."""
    return json.loads(decoded(data), object_pairs_hook=once)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of pairs. Raises ValueError for a key that is given twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:80]!r} is given twice")
    return result
