"""Count long sentences, wide lines and house words: `python docs/site/words.py [PAGE ...]`."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import NamedTuple

HOUSE = (
    "alike|fate|fates|foreseen|gang|gauge|gauges|heard|inbox|lanes|mend|mended|nought|parting|purity|reckoned|"
    "sentry|slab|slabs|therefrom|void"
)
"""Words of a dialect of ours; a page says the field's word, or the plain one."""
OPENING = r"(What|Of|Whom|Who|How)\b"
LONG, WIDE = 30, 100
ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("algorithms", "benchmarks", "configs", "datasets", "docs", "middleware", "simulator", "src", "tasks", "tests")
BLOCK = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
ITEM = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")


class Count(NamedTuple):
    """Figures of one text: lengths of its sentences in words, and the numbers of its wide lines and house words."""

    lengths: list[int]
    long: list[str]
    wide: int
    house: int


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown text, without code, tables, headings and pictures."""
    text = BLOCK.sub("\n\n", text)
    text = "\n".join("" if re.match(r"\s*(#|\||!\[)", line) else line for line in text.splitlines())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "code", text)).replace("*", "")
    found = []
    for part in ITEM.split(text):
        flat = re.sub(r"^\s*(?:[-*>]|\d+\.) ", "", " ".join(part.split()))
        found += re.split(r"(?<=[.!?])\s+(?=[A-Zλ\"(\d]|code|q-)", flat)
    return [sentence for sentence in found if re.search(r"[a-z]", sentence)]


def count(text: str, name: str) -> Count:
    """Count one page; the glossary may say house words."""
    said = sentences(text)
    lengths = [len(re.findall(r"\w[\w'’.,-]*", sentence)) for sentence in said]
    long = [sentence for sentence, n in zip(said, lengths, strict=True) if n > LONG]
    lines = BLOCK.sub("", text).splitlines()
    wide = sum(len(line) > WIDE and not line.lstrip().startswith(("|", "![")) for line in lines)
    house = [] if name.endswith("glossary.md") else re.findall(rf"\b({HOUSE})\b", " ".join(said), re.I)
    return Count(lengths, long, wide, len(house))


def openings() -> list[Path]:
    """Return the modules whose docstring begins with a relative word."""
    files = sorted({path.resolve() for room in ROOMS for path in (ROOT / room).rglob("*.py")})
    texts = [(path, ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") for path in files]
    return [path for path, text in texts if re.match(OPENING, text)]


def main() -> None:
    """Print a row a page, with its long sentences where pages are given, and one of all."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("pages", nargs="*", type=Path)
    given = ask.parse_args().pages
    pages = given or [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    counts = {page: count(page.read_text(encoding="utf-8"), page.name) for page in pages}
    print("words a sentence, sentences above 30, lines above 100, house words, page")
    for page, c in counts.items():
        mean = sum(c.lengths) / max(len(c.lengths), 1)
        print(f"{mean:5.1f} {len(c.long):4} {c.wide:4} {c.house:4}  {page}")
        print(*(f"      {sentence}" for sentence in c.long if given), sep="\n", end="\n" if given and c.long else "")
    lengths = [n for c in counts.values() for n in c.lengths]
    sums = [sum(row) for row in zip(*((len(c.long), c.wide, c.house) for c in counts.values()), strict=True)]
    print(f"{sum(lengths) / len(lengths):5.1f} {sums[0]:4} {sums[1]:4} {sums[2]:4}  all {len(counts)} pages")
    print(f"{len(openings())} module docstrings begin with What, Of, Whom, Who or How")


if __name__ == "__main__":
    main()
