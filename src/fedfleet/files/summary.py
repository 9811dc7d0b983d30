"""The summary of a run, which says by digests what the files beside it are, and itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedfleet.files.documents import json_of, parse_json
from fedfleet.files.writing import check_regular, write_text
from fedfleet.simulator.errors import ConfigError, one_line

SUMMARY = "summary.json"
FILES, ITSELF = "files", "sha256"
"""The keys of the digests, SHA-256: those of files by their names, and that of all other keys of the summary."""
MODELS = ("model.safetensors", "best.safetensors")
TABLES = tuple(
    f"{name}.parquet" for name in ("rounds", "phases", "outcomes", "clients", "domains", "classes", "recall")
)
KEPT = (*TABLES, *MODELS, "samples.safetensors", "decision_boundary.safetensors", "net.json", "vocabulary.json")
"""Files that a run does not change once it has ended, nor may its user."""
TOLD = ("config.yaml", "environment.json", "events.jsonl")
"""Files that say what a run was. A run that goes on compares them with its checkpoint by itself."""
KINDS: dict[str, type] = {
    "status": str,
    "rounds": int,
    **dict.fromkeys(("initial", "final", "best", "selected", "stopped", "own", "examples"), dict),
    "domains": list,
    FILES: dict,
    ITSELF: str,
}
"""What is said under some keys of a summary."""
FIX = (
    "bring back the file that the run wrote, or go on from the last checkpoint without the summary: remove summary.json"
)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary, with the digests of the files beside it."""
    said = parse_json(json.dumps(_finite(dict(summary))))  # as it will be read
    there = (name for name in (*KEPT, *TOLD) if (folder / name).exists())
    said[FILES] = {name: digest(folder / name) for name in there}
    write_text(folder / SUMMARY, json.dumps({**said, ITSELF: _digest(said)}, indent=2))


def read_summary(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the summary of a run, and the digests of its files, of which those of an earlier release have none.

    Both are empty where there is no summary. Raises ConfigError for one that is damaged.
    """
    path = folder / SUMMARY
    fix = f"`fedfleet resume {folder}` makes it anew from the last checkpoint"
    try:
        result = json_of(path, KINDS)
    except FileNotFoundError:
        return {}, {}
    except ConfigError as e:
        raise ConfigError(f"{e}: {fix}") from None
    wanted, whole = result.pop(ITSELF, None), _digest(result)
    told = wanted is not None or FILES in result
    files = result.pop(FILES, None) or {}
    if told and wanted != whole:
        raise ConfigError(f"{path}: damaged: its digest is not that of its contents: {fix}")
    return result, files


def check_files(
    folder: Path, files: Mapping[str, str], names: Iterable[str] = (*KEPT, *TOLD), may_lack: Collection[str] = ()
) -> None:
    """Refuse files of a run that are not there, or are not what the run wrote. Raises ConfigError."""
    for name in names:
        path, wanted = folder / name, files.get(name)
        if wanted is None:
            continue
        try:
            result = digest(path)
        except FileNotFoundError:
            if name in may_lack:
                continue
            raise ConfigError(f"{path}: it is missing, and {SUMMARY} has its digest: {FIX}") from None
        except OSError as e:
            raise ConfigError(f"{path}: cannot be read ({one_line(e.strerror or e)}): {FIX}") from None
        if result != wanted:
            raise ConfigError(f"{path}: damaged or changed: its digest is not that in {SUMMARY}: {FIX}")


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of a run; empty where there is none, or none that can be read."""
    try:
        return read_summary(folder)[0]
    except ConfigError:
        return {}


def checked_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run, empty where there is none.

    Raises ConfigError where it is damaged, or a file of the run is missing, damaged or changed; models may be missing, since
    whoever reads one says so.
    """
    summary, files = read_summary(folder)
    check_files(folder, files, may_lack=MODELS)
    return summary


def ended(folder: Path) -> dict[str, Any]:
    """Return the summary of a run as ``summary_of`` does. Raises ConfigError where tables or models are not those it is of.

    The last model may be missing, since a run that goes on writes it anew.
    """
    try:
        summary, files = read_summary(folder)
    except ConfigError:
        return {}
    check_files(folder, files, KEPT, may_lack=MODELS[:1])
    return summary


def digest(path: Path) -> str:
    """Return the SHA-256 of a regular file. Raises OSError."""
    check_regular(path.stat())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for, NaN and infinities, by None."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
