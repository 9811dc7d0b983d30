"""``fedfleet schema``: what comes with fedfleet is valid by it, every name and option is in it, and what is misspelt is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from fedfleet.commands import schema, show_named
from fedfleet.config.reading import plain, read
from fedfleet.config.schema import Config, load
from fedfleet.simulator.errors import ConfigError
from tests.front.commands.lines import line

Command = Callable[..., tuple[int, str, str]]
CONFIGS = Path(__file__).parents[3] / "configs"
SCHEMAS = {kind: make() for kind, make in schema.KINDS.items()}
VALID = {kind: Draft202012Validator(found) for kind, found in SCHEMAS.items()}
KINDS = show_named.kinds()
ALL = [(kind, name) for kind, of in KINDS.items() for name in of.registry]


@pytest.mark.slow
def test_they_are_schemas_and_say_of_what_version() -> None:
    for found in SCHEMAS.values():
        Draft202012Validator.check_schema(found)
    assert SCHEMAS["config"]["$id"] == "urn:fedfleet:config:1"
    assert set(SCHEMAS["config"]["properties"]) == set(Config.model_fields)
    assert "``" not in json.dumps(SCHEMAS)


@pytest.mark.slow
def test_every_configuration_and_table_is_valid(subtests: pytest.Subtests) -> None:
    for path in sorted(CONFIGS.rglob("*.yaml")):
        with subtests.test(str(path.relative_to(CONFIGS))):
            kind = "table" if path.stem.endswith("_table") else "config"
            VALID[kind].validate(plain(read(path)))


def options(node: Any) -> Iterator[str]:
    """Yield every option of a section, those of sections in it below them, as `show_named.fields` does."""
    for alternative in schema._alternatives(node, SCHEMAS["config"]["$defs"]):
        for key, each in alternative.get("properties", {}).items():
            yield key
            yield from (f"{key}.{inner}" for inner in options(each))
        if "items" in alternative:
            yield from options(alternative["items"])


def test_every_name_has_its_options_and_no_others(subtests: pytest.Subtests) -> None:
    for kind, name in ALL:
        with subtests.test(f"{kind} {name}"):
            of, defs = KINDS[kind], SCHEMAS["config"]["$defs"]
            key, there = of.registry.key, defs[f"{kind}_{name}"]
            rows = show_named.fields(of.registry[name].options)
            assert {row[0] for row in rows} | {key} <= {*options(there)}
            alone = Draft202012Validator({"$ref": f"#/$defs/{kind}_{name}", "$defs": defs})
            node = yaml.safe_load(show_named.example(kind, name))
            for part in of.section.split(".") if "delta" not in name else ("transforms", "down"):
                node = node[part]
            section = node[0] if isinstance(node, list) else node
            alone.validate(section)
            for wrong in ({"misspelt": 1}, {key: f"{name}s_"}):
                assert not alone.is_valid(section | wrong)


TAKEN = [
    {"algorithm": "fedavg", "task": None, "track": "csv"},
    {"algorithm": {"lr": 0.5}, "population": {"partition": {}, "dataset": {}}},
    {"algorithm": "mine.net:make", "task": {"name": "nets:make", "arguments": {"blocks": 2}}},
    {"task": "nets:make", "task.arguments.blocks": 2},
    {"algorithm": {"name": "mine:make", "lr": 0.1, "client_optimizer": "adam", "heat": 2.0, "arguments": {"power": 2}}},
    {
        "algorithm": "mine:make",
        "algorithm.lr": 0.1,
        "vary": {"algorithm.lr": [0.1, 0.2]},
        "algorithm.lr_schedule": "cosine",
    },
    {"algorithm": {"name": "robust", "of": {"name": "fedprox", "mu": 0.1}}},
    {"algorithm": {"name": "robust", "of": "scaffold"}, "cohort.size": 4, "vary.seed": [1, 2]},
    {"transforms": {"up": [{"name": "top_k", "share": 0.1}, "bf16"]}, "track": ["csv", {"name": "tensorboard"}]},
    {"compare": {"a": {"algorithm.name": "fedprox", "algorithm.mu": 0.1}, "b": {"algorithm": {"lr": 0.2}}}},
    {"compare": {"a": {"task.arguments.blocks": 2, "population.dataset": "mnist", "algorithm.of": "fedprox"}}},
    {"vary": {"availability.rate": [0.5, 1.0], "population.partition": ["iid", {"kind": "dirichlet", "alpha": 0.1}]}},
    {"devices": "lognormal", "selection": {"kind": "oort"}, "domains": {"kind": "label"}, "attack": "none"},
    {"stop_if_diverged": "not_finite", "executor": {"actors": "auto"}, "privacy": None, "seeds": [0, 1]},
]
REFUSED = [
    {"round": 3}, {"rounds": "3"}, {"rounds": -1}, {"schema_version": 2}, {"algorithm": "fedavgg"}, {"algorithm": {"mu": 0.1}},
    {"algorithm": {"name": "fedavg", "mu": 0.1}}, {"algorithm": {"name": "robust", "of": "omg"}}, {"attack": "mine:attack"},
    {"algorithm": {"name": "robust", "of": {"name": "fedavg", "mu": 0.1}}}, {"task": {"name": "nets:make", "hidden": [2]}},
    {"availability": {"kind": "markov"}}, {"population": {"dataset": {"name": "digit"}}}, {"cohort.invit": 4},
    {"cohort.size": 0}, {"transforms": {"up": ["top_kk"]}}, {"transforms": {"up": [None]}}, {"track": ["mlflows"]},
    {"executor": {"kind": "dask"}}, {"compare": {"a": {"algorithm.mue": 0.1}}}, {"compare": {"a": {"algorithm": {"mue": 0.1}}}},
    {"compare": {"a": {"availability.rate": 2.0}}}, {"compare": {}}, {"vary": {"availability.rate": [2.0]}},
    {"vary": {"availability.rates": [1.0]}}, {"vary": {"seed": []}}, {"vary.sed": [1]}, {"vary": {"task.arguments.blocks": 2}},
    {"vary": {"secure_aggregation.clip.change": [-1]}}, {"secure_aggregation.clip.change": -1}, {"task.argument.blocks": 2},
    {"task": "my nets:make"}, {"task.argumentsblocks": 2},
]  # fmt: skip


def test_what_the_reader_takes_is_valid(subtests: pytest.Subtests) -> None:
    for given in TAKEN:
        with subtests.test(str(given)):
            VALID["config"].validate(given)
            load(given)


def test_what_the_reader_refuses_is_not(subtests: pytest.Subtests) -> None:
    table = plain(read(CONFIGS / "afl" / "adult_table.yaml"))
    assert not VALID["table"].is_valid({**table, "digit": 1})
    assert not VALID["table"].is_valid({k: v for k, v in table.items() if k != "config"})
    for given in REFUSED:
        with subtests.test(str(given)):
            assert not VALID["config"].is_valid(given)
            sections = {key.partition(".")[0] for key in given}
            if not {"compare", "vary"} & sections:  # of which each run is read by itself
                with pytest.raises(ConfigError):
                    load(given)


def test_the_command_prints_or_writes_it(command: Command, tmp_path: Path) -> None:
    status, printed, _ = command("schema")
    assert status == 0
    assert json.loads(printed) == SCHEMAS["config"]
    out = tmp_path / "table.json"
    assert command("schema", "table", "--out", out)[0] == 0
    assert json.loads(out.read_text(encoding="utf-8")) == SCHEMAS["table"]
    for words, said in ((["tables"], "choose config or table"), (["--out", tmp_path], "cannot be written")):
        assert said in line(command("schema", *words))
