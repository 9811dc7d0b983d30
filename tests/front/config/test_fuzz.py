"""Configurations and traces damaged at random: each is taken, or refused in one line with exit status 2."""

from __future__ import annotations

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.front.commands.lines import line

BASE: dict[str, Any] = {
    "rounds": 2, "population": {"dataset": "digits", "clients": 30, "partition": {"kind": "label_sorted"}},
    "task": {"name": "auc", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "cdma_ada", "steps": 2, "batch_size": 5}, "cohort": {"size": 8, "wait_for": "siwer"},
    "executor": {"kind": "local"}, "availability": {"kind": "bernoulli", "rate": 0.5}, "vary": {"seed": [0]},
    "compare": {"A": {}, "B": {"rounds": 1}}, "warm_start": None,
}  # fmt: skip
ODD = [
    *("", None, True, -1, 0, 3, 1e308, 2**63, 10**400, [], {}, [[[]]], {"a": 1}, {"name": {"name": 1}}, {"kind": []}),
    *("a\0b", "\ud800", "\x1b[31m", "a\nb", "x" * 300, "/dev/null", "..", "~nobody/x", "{}", "1e999", "2020-01-01"),
]
ODD_YAML = [
    "!!bool maybe", "!!int ''", "!!float x", "!!timestamp x", "!!binary x", "!!set {a}", "!!python/name:os.system", "*no",
    "&a [*a]", "{<<: [1]}", "{[a]: b}", "{null: 1}", "{.nan: 1}", "1:2:99", '"\\0"', '"\\ud800"', "[" * 10_000, "%X",
]  # fmt: skip
BYTES = [b"\0", b"\xff", b"\xef\xbb\xbf", b"\x1b", b"\xc2\x85", *(bytes([c]) for c in b"\t\n[{&*!:'%")]


def damaged(data: bytes, r: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(r.randint(1, 3)):
        at = r.randrange(len(found))
        found[at : at + r.randint(0, 2)] = r.choice([*BYTES, bytes([r.randrange(256)])])
    return bytes(found)


def configuration(r: random.Random) -> bytes:
    given = copy.deepcopy(BASE)
    for key in r.sample(["vary", "compare", "warm_start", "availability"], 2):
        del given[key]
    section = r.choice([given, *(v for v in given.values() if isinstance(v, dict))])
    section[r.choice(list(section))] = r.choice(ODD)
    lines = yaml.safe_dump(given).splitlines()
    at = r.randrange(len(lines))
    if r.random() < 0.3:
        lines[at] = f"{lines[at].split(':')[0]}: {r.choice(ODD_YAML)}"
    elif r.random() < 0.2:
        lines.insert(at, lines[at])
    data = "\n".join(lines).encode()
    return damaged(data, r) if r.random() < 0.4 else data


def trace(r: random.Random) -> bytes:
    given: Any = {
        "a": {"active": [1, 5], "inactive": [3, 6], "finish_time": 10},
        "b": {"active": [0], "inactive": [4.5], "finish_time": 20},
    }
    if r.random() < 0.6:
        given["a"][r.choice(["active", "inactive", "finish_time"])] = r.choice([*ODD, [1, "x"], [None]])
    elif r.random() < 0.5:
        given[r.choice(["\ud800", "a\0b", "7", ""])] = given["b"]
    data = json.dumps(given).encode() if r.random() < 0.5 else pickle.dumps(given, r.randrange(6))
    return damaged(data, r) if r.random() < 0.5 else data


def test_all_is_taken_or_refused(subtests: pytest.Subtests, command, tmp_path: Path):
    given, out = tmp_path / "given", tmp_path / "out.parquet"
    for make, count, words in ((configuration, 40, ("plan", given)), (trace, 30, ("trace", given, out))):
        for seed in range(count):
            with subtests.test(f"{make.__name__} {seed}"):
                given.write_bytes(make(random.Random(seed)))
                out.unlink(missing_ok=True)
                found = command(*words)
                assert found[0] == 0 or line(found), found
