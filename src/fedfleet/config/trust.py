"""Trust in run folders that name code to call: one that was written here has a seal, any other is asked about.

A seal is a comment at the end of the file: an HMAC-SHA-256 of what the configuration says, with a key that lies in the user's state
folder and is in no run folder. A configuration that names no code and reaches no other machine needs none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedfleet.files.documents import SEALED, YAML_BYTES, dump, leaves, parse, sealed_text, text_of
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.named import is_path
from fedfleet.tasks.transformer import PREFIX

KEY_BYTES = 32
SEAL = re.compile(r"^# sealed by fedfleet: ([0-9a-f]{64})\n?\Z", re.M)
OF_RUNS = (
    *("summary.json", "environment.json", "status.json", "events.jsonl"),
    *("rounds.parquet", "phases.parquet", "outcomes.parquet"),
)
"""Any of these beside a configuration tells that a run has written it. So does a seal in it, whoever's."""
OF_SEVERAL = {"campaign.yaml": (".",), "tune.yaml": ("journal.jsonl", "trials")}
"""Configurations of several runs: any of these beside one tells that fedfleet has written it, "." by its
name alone. So does a digest in it."""
FREE = ("label", "rounds", "until", "max_seconds", "stop_if_diverged", "patience", "checkpoint")
"""Keys that may be changed by hand: they neither name code nor are given to any."""
SENDS = ("mlflow", "wandb")  # trackers that tell other machines
MADE = ("task.own.", "algorithm.own.", "population.dataset.own.")
"""What is said of parts that were made in Python, which no configuration can name."""
INSTEAD = {
    "executor.address": "executor.address=HOST:PORT of a cluster of yours, or null",
    "track": "track=[]",
    "callbacks": "callbacks=[]",
}
"""Keys that a resume may change, and how to do without what they name."""
PLACES = ("uri", "dir")  # options of trackers that name a place outside the run folder


def outside(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration names outside of it, by dotted key: code as ``module:name``, a cluster, trackers' places.

    It is looked for everywhere, also in what ``compare`` and ``vary`` set.
    """
    return {
        key: value for key, value in leaves(config, into_lists=True) if value is not None and _is_outside(key, value)
    }


def _is_outside(key: str, value: Any) -> bool:
    *above, last = key.split(".")
    if key.startswith(MADE) or last == "label":
        return False
    if (last == "address" and above[-1:] == ["executor"]) or ("track" in key and (last in PLACES or value in SENDS)):
        return True
    return is_path(value) and not (last == "model" and value.startswith(PREFIX))


def dumped(config: Mapping[str, Any], *, several: bool = False) -> str:
    """Return a configuration in YAML, with a seal if it needs one and a key can be kept; that of ``several`` runs has a digest."""
    text = dump(dict(config))
    text = sealed_text(text) if several else text
    if not outside(config) or (key := _key()) is None:
        return text
    return f"{text}# sealed by fedfleet: {_seal(key, parse(text))}\n"


def check(path: Path, overrides: Iterable[str] = (), *, trust: bool, section: str = "") -> None:
    """Refuse the configuration of a run that names what is outside, if it has no seal of this user's, unless it is trusted.

    What the keys of ``overrides`` set is not asked about; nor, where only a ``section`` of it is to be called, what others name.
    What cannot be read is let be, since whoever reads it says so. Raises ConfigError.
    """
    try:
        text = text_of(path, YAML_BYTES)
        config = parse(text)
    except (OSError, ValueError):
        return
    if trust or not isinstance(config, dict):
        return
    given = tuple(f"{key}." for key in overrides)
    result = {
        key: value
        for key, value in outside(config).items()
        if f"{key}.".startswith(section) and not f"{key}.".startswith(given)
    }
    if not result:
        return
    seal, secret = SEAL.search(text), _key(made=False)
    if seal is not None and secret is not None and hmac.compare_digest(seal[1], _seal(secret, config)):
        return
    key, value = next(iter(result.items()))
    more = f" and {len(result) - 1} more" if len(result) > 1 else ""
    instead = next(
        (f"; or override it: {text}" for name, text in INSTEAD.items() if f"{key}.".startswith(f"{name}.")), ""
    )
    raise ConfigError(
        f"{path}: {key}={show(value)}{more} would be called or reached, and no run of yours on this machine wrote that: look at "
        f"it, then give --trust (in Python trust=True){instead}"
    )


def is_of_a_run(path: Path) -> bool:
    """Say whether a configuration was written by a run, or by several, as far as what lies beside it tells."""
    if any((path.parent / name).exists() for name in (*OF_RUNS, *OF_SEVERAL.get(path.name, ()))):
        return True
    with suppress(OSError, ValueError):
        text = text_of(path, YAML_BYTES)
        return SEAL.search(text) is not None or SEALED in text
    return False


def _seal(key: bytes, config: Mapping[str, Any]) -> str:
    """Return the seal of a configuration: of all that its code may be given, and of whom it reaches."""
    said = {k: v for k, v in config.items() if k not in FREE}
    if isinstance(executor := said.pop("executor", None), dict):
        said["executor"] = executor.get("address")
    return hmac.new(key, json.dumps(said, sort_keys=True, default=str).encode(), hashlib.sha256).hexdigest()


def key_file() -> Path:
    """Return where the key lies: ``fedfleet/key`` in the user's state folder. Raises RuntimeError where there is none."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fedfleet" / "key"


def _key(*, made: bool = True) -> bytes | None:
    """Return the user's key, ``made`` if need be; None where it cannot be made, or others might know it."""
    with suppress(OSError, RuntimeError):
        path = key_file()
        if made and not path.exists():
            _make(path)
        with path.open("rb") as file:
            told = os.fstat(file.fileno())
            mine = stat.S_ISREG(told.st_mode) and _private(told)
            result = file.read(KEY_BYTES + 1)
        return result if mine and len(result) == KEY_BYTES else None
    return None


def _private(told: os.stat_result) -> bool:
    """Say whether a file is this user's alone, where the system has such."""
    return not hasattr(os, "getuid") or (told.st_uid == os.getuid() and not told.st_mode & 0o077)


def _make(path: Path) -> None:
    """Write a new key, whole; if another process was first, its key stays. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
