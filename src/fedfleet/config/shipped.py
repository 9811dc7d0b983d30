"""Configurations that come with the package, by name: ``quickstart``, ``cdma/auc_fashion_mnist`` and so on."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from fedfleet.files.documents import is_there

PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parents[1] / "configs") if folder.is_dir()), PACKAGE / "configs"
)
"""Where they are: in the package, or in the repository where links are no links."""


def names() -> Iterator[tuple[str, str]]:
    """Yield the names in order, each with the first line of what its file says of itself."""
    for path in sorted(FOLDER.rglob("*.yaml")):
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip()
        yield path.relative_to(FOLDER).with_suffix("").as_posix(), first.removeprefix("# ").removeprefix("title: ")


def like(path: Path) -> str | None:
    """Return the name of the configuration that was most likely meant by a path that is not there."""
    given = path.with_suffix("").as_posix().removeprefix("./").removeprefix("configs/")
    return next(iter(difflib.get_close_matches(given, [name for name, _ in names()], n=1, cutoff=0.7)), None)


def locate(path: Path) -> Path:
    """Return a path that is there; otherwise the file that comes with the package under that name, or the path as it is."""
    if is_there(path) or path.is_absolute() or ".." in path.parts:
        return path
    shipped = FOLDER / path.with_suffix(".yaml")
    return shipped if path.suffix in ("", ".yaml") and is_there(shipped) else path
