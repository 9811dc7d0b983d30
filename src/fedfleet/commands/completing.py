"""Shell completion of names and run folders.

A key press waits for it, so PyTorch is imported only where names are not known yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import click

HERE = Path(__file__).resolve().parents[1]
RUN = ("config.yaml", "campaign.yaml", "tune.yaml")
LOOKED_AT = 2_000  # folders, at most


def kinds(incomplete: str) -> list[str]:
    """Return what `list` lists."""
    return _begun(built_in(), incomplete)


def shown(incomplete: str) -> list[str]:
    """Return what `show` shows, but for sections."""
    return _begun(("data", "compatibility", "config", "correction", *built_in()), incomplete)


def named(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the names of the kind that stands before; where it is data, nothing, and the shell completes files."""
    word, known = str(ctx.params.get("what")), built_in()
    kind = next((each for each in (word, word.removesuffix("s")) if each in known), None)
    return [] if kind is None else _begun(names(kind), incomplete)


def names(kind: str) -> list[str]:
    """Return the names of a kind, those of installed packages last."""
    from importlib.metadata import entry_points  # here, for no command but this one needs what it imports

    groups = (f"fedfleet.{kind}", f"fedfleet.{kind}s")
    return [*dict.fromkeys([*built_in()[kind], *(each.name for group in groups for each in entry_points(group=group))])]


def built_in() -> dict[str, list[str]]:
    """Return every kind of part and its names.

    That takes seconds the first time, and whenever code has changed; a file in the user's cache keeps it.
    """
    newest = max(path.stat().st_mtime_ns for path in HERE.glob("*/*.py"))
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedfleet" / f"names-{newest}.json"
    with suppress(OSError, ValueError):
        return json.loads(kept.read_text(encoding="utf-8"))
    from fedfleet.commands import show_named

    result = {kind: list(of.registry) for kind, of in show_named.kinds().items()}
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(result), encoding="utf-8")
    return result


def runs(incomplete: str) -> list[str]:
    """Return the run folders whose path begins so, up to two levels below; where there are none, the shell completes files."""
    return sorted(str(path) for path in islice(_below(incomplete), LOOKED_AT) if any((path / f).exists() for f in RUN))


def _below(incomplete: str) -> Iterator[Path]:
    head, _, begun = incomplete.rpartition("/")
    first = _folders(Path(head or ("/" if incomplete.startswith("/") else ".")))
    for one in (path for path in first if path.name.startswith(begun)):
        yield one
        for two in _folders(one):
            yield two
            yield from _folders(two)


def _folders(path: Path) -> Iterator[Path]:
    try:
        yield from (each for each in path.iterdir() if not each.name.startswith(".") and each.is_dir())
    except OSError:
        return


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
