"""The manifests for KubeRay have the fields it knows, agree with one another, and are sparing with rights."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from fedfleet.config.schema import load
from tests.recipes.files import ROOT, options_of_ray_start, with_block

HERE = ROOT / "recipes" / "kuberay"


def closed(node: Any) -> Any:
    """A schema whose objects with properties have no others."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: each if key in ("if", "then", "else") else closed(each) for key, each in node.items()}
    return (
        node | {"type": "object", "additionalProperties": False} if isinstance(node.get("properties"), dict) else node
    )


SCHEMA = closed(json.loads((Path(__file__).parent / "kuberay.json").read_text(encoding="utf-8")))
MANIFESTS = ["raycluster.yaml", "rayjob.yaml"]


def read(name: str, block: str | None = None) -> Any:
    return with_block(HERE / name, block)


def cluster(manifest: Any) -> Any:
    return manifest["spec"] if manifest["kind"] == "RayCluster" else manifest["spec"]["rayClusterSpec"]


def templates(manifest: Any) -> list[Any]:
    found = cluster(manifest)
    groups = [found["headGroupSpec"], *found["workerGroupSpecs"]]
    own = manifest["spec"].get("submitterPodTemplate")
    return [group["template"] for group in groups] + ([own] if own else [])


@pytest.fixture(params=[(name, block) for name in MANIFESTS for block in (None, "gpu")], ids=str)
def manifest(request: pytest.FixtureRequest) -> Any:
    return read(*request.param)


def test_the_fields_are_those_of_kuberay_and_of_ray_start_and_the_head_takes_no_blocks(manifest: Any):
    jsonschema.validate(manifest, SCHEMA)
    found = cluster(manifest)
    assert found["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in [found["headGroupSpec"], *found["workerGroupSpecs"]]:
        assert {f"--{name}" for name in group["rayStartParams"]} <= options_of_ray_start()
    version = found["rayVersion"]
    assert f"ray=={version}\n" in (ROOT / "recipes" / "constraints.txt").read_text(encoding="utf-8")
    assert tuple(map(int, version.split("."))) >= (2, 53, 0)  # knows tokens and the probe
    assert found["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(("change", "said"), [
    (lambda spec: spec.update(rayVersoin="2.60.0"), "rayVersoin"),
    (lambda spec: spec["authOptions"].update(mode="secret"), "secret"),
    (lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "is not of type 'string'"),
    (lambda spec: spec["workerGroupSpecs"][0].pop("maxReplicas"), "maxReplicas"),
])  # fmt: skip
def test_what_kuberay_does_not_know_is_refused(change: Any, said: str):
    for name in MANIFESTS:
        manifest = read(name)
        change(cluster(manifest))
        with pytest.raises(jsonschema.ValidationError, match=said):
            jsonschema.validate(manifest, SCHEMA)


def test_groups_grow_from_least_to_most_only_one_has_gpus_and_a_job_has_the_same():
    for block in (None, "gpu"):
        assert cluster(read("raycluster.yaml", block)) == cluster(read("rayjob.yaml", block))
    groups = cluster(read("raycluster.yaml", "gpu"))["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["cpu", "gpu"]
    for group in groups:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert ("nvidia.com/gpu" in limits) == (group["groupName"] == "gpu")


def test_workers_end_their_blocks_before_they_are_killed(manifest: Any):
    """``ray start --block`` drains its node when it is told to end; KubeRay starts Ray so."""
    from ray._private import ray_constants

    for group in cluster(manifest)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (drains,) = pod["containers"][0]["env"]
        assert hasattr(ray_constants, drains["name"])
        assert 30 < float(drains["value"]) < pod["terminationGracePeriodSeconds"]


def test_probes_ask_for_what_ray_answers_without_a_token(manifest: Any):
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

    agent = Path(ray.__file__).with_name("dashboard") / "http_server_agent.py"  # it is only imported with ray[default]
    free = agent.read_text(encoding="utf-8")
    for template in templates(manifest)[: 1 + len(cluster(manifest)["workerGroupSpecs"])]:
        container = template["spec"]["containers"][0]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[kind]["httpGet"]
            assert asked["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
            assert f'"{asked["path"]}"' in free


def test_nobody_is_root_and_pods_have_bounds_and_the_label_of_the_policy(manifest: Any):
    claim, policy = yaml.safe_load_all((HERE / "around.yaml").read_text(encoding="utf-8"))
    label = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == label
    for template in templates(manifest):
        pod = template["spec"]
        assert template["metadata"]["labels"] == label
        assert pod["securityContext"]["runAsNonRoot"] is True
        for volume in pod.get("volumes", []):
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    assert len({t["spec"]["containers"][0]["image"] for t in templates(manifest)}) == 1


def test_the_entrypoint_is_a_run_that_can_be():
    job = read("rayjob.yaml")
    program, config, out, *overrides = shlex.split(job["spec"]["entrypoint"])
    image = (HERE / "Dockerfile").read_text(encoding="utf-8")
    assert f"recipes/{program} /usr/local/bin/{program}" in image
    assert "COPY configs /opt/fedfleet/configs" in image
    executor = load(ROOT / Path(config).relative_to("/opt/fedfleet"), overrides).executor
    assert executor.address == "auto"
    least = cluster(job)["workerGroupSpecs"][0]
    cpus = int(least["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert executor.actors == least["minReplicas"] * cpus
    head = cluster(job)["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert Path(out).parent == Path(head["volumeMounts"][0]["mountPath"])


def test_the_image_has_what_it_copies_and_is_not_root():
    lines = (HERE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    copied = [s for line in lines if line.startswith("COPY ") and "--from" not in line for s in line.split()[1:-1]]
    rooms = {"src", "simulator", "algorithms", "datasets", "tasks", "middleware"}
    assert set(copied) >= {"pyproject.toml", "README.md", "LICENSE"} | rooms
    assert all((ROOT / source).exists() for source in copied)
    let_in = (HERE / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in let_in if line.startswith("!")} == set(copied)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000:1000"]
    assert all("--no-cache-dir" in line for line in lines if re.search(r"\bpip (install|wheel)\b", line))
    assert any("--constraint" in line and '"ray[default]"' in line for line in lines)
    assert not any(line.startswith("EXPOSE") for line in lines)
    instructions = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert set(instructions) <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}
    last = len(lines) - lines[::-1].index(next(line for line in lines[::-1] if line.startswith("FROM ")))
    assert "ARG TORCH_INDEX=" in lines[last:]  # which wheels of torch: those with CUDA, or an index of those without
    assert any("${TORCH_INDEX:+--extra-index-url" in line for line in lines[last:])
    assert "ARG EXTRAS=" in lines[last:]
    program = ROOT / "recipes" / "run_or_resume.sh"
    assert program.stat().st_mode & 0o111


WHEEL = "fedfleet-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("extras", "index", "asked"), [("", "", ""), ("wandb,mlflow", "", "[wandb,mlflow]"), ("", "https://a/cpu", "")]
)
def test_the_image_is_built_with_the_extras_that_are_asked_for(extras, index, asked, tmp_path):
    """What the shell of the image makes of the command that installs, where pip tells its arguments instead."""
    lines = (HERE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (command,) = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN pip install")]
    (tmp_path / WHEEL).touch()
    (tmp_path / "pip").write_text('#!/bin/sh\nfor each; do echo "$each"; done\n')
    (tmp_path / "pip").chmod(0o755)
    script = command.partition(" && ")[0].replace("/opt/fedfleet/wheels", str(tmp_path))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXTRAS": extras, "TORCH_INDEX": index}
    told = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[told.index("ray[default]") + 1 :] == [f"{tmp_path}/{WHEEL}{asked}"]
    assert [each for each in told if each.startswith("https")] == ([index] if index else [])
