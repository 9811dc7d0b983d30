"""The recipes' files for Ray's launcher, which takes them with each provider."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.recipes.files import ROOT, blocks, options_in, options_of_ray_start, with_block

CLUSTER = ROOT / "cluster.yaml"
PROVIDERS = ["aws", "gcp", "local"]
CLOUDS = PROVIDERS[:2]


@pytest.fixture(params=PROVIDERS)
def config(request: pytest.FixtureRequest) -> Any:
    return with_block(CLUSTER, request.param)


def test_the_file_as_it_stands_is_the_one_for_aws():
    assert blocks(CLUSTER) == PROVIDERS
    assert yaml.safe_load(CLUSTER.read_text(encoding="utf-8")) == with_block(CLUSTER, "aws")


def test_the_launcher_takes_it_and_would_refuse_a_key_it_does_not_know(config: Any):
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert prepared["provider"]["type"] in PROVIDERS
    assert prepared["setup_commands"] == config["setup_commands"]
    wrong = with_block(CLUSTER, "aws")
    wrong["available_node_types"]["cpu_worker"]["least_workers"] = 1
    with pytest.raises(jsonschema.ValidationError, match="least_workers"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("provider", CLOUDS)
def test_the_head_takes_no_blocks_and_workers_come_as_they_are_needed(provider: str):
    prepared = prepare_config(with_block(CLUSTER, provider))
    types = prepared["available_node_types"]
    head = types.pop(prepared["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    assert head["max_workers"] == 0
    bounds = {name: (t["min_workers"], t["max_workers"]) for name, t in types.items()}
    assert bounds == {"cpu_worker": (0, 8), "gpu_worker": (0, 4)}
    assert prepared["max_workers"] == sum(t["max_workers"] for t in types.values())


def test_options_of_ray_start_tokens_and_packages_are_there(config: Any):
    commands = [c for c in config["head_start_ray_commands"] + config["worker_start_ray_commands"] if "ray start" in c]
    assert len(commands) == 2
    for command in commands:
        assert options_in(command) >= {"--object-manager-port"}
        assert options_in(command) <= options_of_ray_start()
        assert "RAY_AUTH_MODE=token" in command
    assert "--num-cpus=0" in commands[0]
    assert "--include-dashboard=false" in commands[0]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert config["file_mounts"]["~/fedfleet"] == "."
    install = config["setup_commands"][-1]
    for word in install.split():
        if word.startswith("~/fedfleet"):
            assert (ROOT / Path(word).relative_to("~/fedfleet")).exists()
    assert "--constraint ~/fedfleet/recipes/constraints.txt" in install


def test_the_lock_has_what_fedfleet_asks_for():
    lines = (ROOT / "recipes" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for asked in map(Requirement, project["dependencies"]):
        assert asked.specifier.contains(locked[canonicalize_name(asked.name)]), asked
