"""Text in files, which is UTF-8; and JSON of which nothing is given twice."""

from __future__ import annotations

import codecs
import json
from typing import Any

MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "UTF-8": (codecs.BOM_UTF8,),
}
"""How a file begins that says its encoding; that of UTF-32 begins as that of UTF-16 does."""
LOOKED = 4096  # bytes of a file without such a mark that are looked through for zeros, of which text has none


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
    return json.loads(decoded(data), object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:80]!r} is given twice")
    return found
