"""The arrows between the folders point one way, and the folder ``datasets`` hides nothing."""

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = sorted((ROOT / "simulator").rglob("*.py"))
ALGORITHMS = sorted((ROOT / "algorithms").glob("*.py"))
INSTALLED = {d.name for d in importlib.metadata.distributions()}
needs_hugging_face = pytest.mark.skipif("datasets" not in INSTALLED, reason="Hugging Face datasets is not installed")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(source: str) -> Iterator[str]:
    """Every module or member a source imports, wherever in it, by its full dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(source: str) -> Iterator[str]:
    """Every attribute chain a source writes, such as ``torch.autograd.grad``, and each import."""
    yield from imported(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def under(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def test_the_helpers_find_what_they_should():
    source = (
        "import torch as t\ndef f():\n    from fedfleet.simulator import gradient\n    return torch.autograd.grad(1)"
    )
    assert set(imported(source)) == {"torch", "fedfleet.simulator.gradient"}
    assert "torch.autograd.grad" in set(dotted(source))
    assert len(ENGINE) > 15
    assert len(ALGORITHMS) > 5


@pytest.mark.parametrize("path", ENGINE, ids=named)
def test_the_engine_imports_nothing_above_it(path):
    for name in imported(path.read_text()):
        assert not under(name, "simulator", "algorithms", "tasks", "datasets"), name
        assert not under(name, "fedfleet") or under(name, "fedfleet.simulator"), name


@pytest.mark.parametrize("folder", ["tasks", "datasets"])
def test_tasks_and_data_know_neither_algorithms_nor_the_front_door(folder):
    for path in sorted((ROOT / folder).glob("*.py")):
        for name in imported(path.read_text()):
            assert not under(name, "fedfleet") or under(name, f"fedfleet.{folder}", "fedfleet.simulator"), (path, name)


@pytest.mark.parametrize("path", ALGORITHMS, ids=named)
def test_algorithms_take_gradients_through_ops_alone(path):
    source = path.read_text()
    allowed = ("fedfleet.algorithms", "fedfleet.simulator")
    engine_room = [f"fedfleet.simulator.{m}" for m in ("gradient", "client", "block", "round", "simulate", "executors")]
    for name in imported(source):
        assert not under(name, "fedfleet") or under(name, *allowed), name
        assert not under(name, *engine_room), name
    for name in dotted(source):
        assert not under(name, "torch.autograd", "torch.func", "torch.no_grad", "torch.enable_grad"), name
        assert name.rsplit(".", 1)[-1] not in {"backward", "requires_grad_", "EngineOps"}, name


def test_the_folder_of_data_sets_is_no_regular_package():
    assert not (ROOT / "datasets" / "__init__.py").exists()
    assert (ROOT / "datasets" / "registry.py").exists()


SCRIPT = """
import sys
assert {root!r} in sys.path, sys.path
import datasets
assert datasets.load_dataset
print(datasets.__file__)
"""
RAY_SCRIPT = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")

@ray.remote
def where():
    import importlib.util, sys
    assert {root!r} in sys.path, sys.path
    ours = importlib.util.find_spec("fedfleet").submodule_search_locations[0] + "/datasets/registry.py"
    return importlib.util.find_spec("datasets").origin, ours

print(*ray.get(where.remote()))
ray.shutdown()
"""


def run(script: str) -> list[Path]:
    """Run a script as a user does who stands in the repository root; return the paths it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script.format(root=str(ROOT))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.split()]


@needs_hugging_face
def test_hugging_face_datasets_is_not_hidden_in_the_repository_root():
    (theirs,) = run(SCRIPT)
    assert theirs.name == "__init__.py"
    assert not theirs.is_relative_to(ROOT / "datasets")


@needs_hugging_face
@pytest.mark.ray
def test_hugging_face_datasets_is_not_hidden_from_ray_workers():
    theirs, ours = run(RAY_SCRIPT)
    assert theirs.name == "__init__.py"
    assert not theirs.is_relative_to(ROOT / "datasets")
    assert ours.samefile(ROOT / "datasets" / "registry.py")
