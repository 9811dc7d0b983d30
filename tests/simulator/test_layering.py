"""The arrows between the folders point one way, and the folder ``datasets`` hides nothing."""

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fedfleet import author as all_of_it
from fedfleet.simulator import author

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = {d.name for d in importlib.metadata.distributions()}
needs_hugging_face = pytest.mark.skipif("datasets" not in INSTALLED, reason="Hugging Face datasets is not installed")


def modules() -> dict[str, Path]:
    """Every module of fedfleet by its dotted name; a package by its own."""
    homes = {"fedfleet": ROOT / "src" / "fedfleet"}
    homes |= {f"fedfleet.{n}": ROOT / n for n in ("simulator", "algorithms", "tasks", "middleware", "datasets")}
    found = {}
    for home, folder in homes.items():
        for path in folder.rglob("*.py"):  # which does not follow the links beside the front door
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([home, *parts]).removesuffix(".__init__")] = path
    return found


MODULES = modules()
SOURCES = {name: path.read_text() for name, path in MODULES.items()}
ROOMS = sorted({name.rpartition(".")[0] for name in MODULES if "." in name.removeprefix("fedfleet.")})
ALGORITHMS = [name for name in MODULES if name.startswith("fedfleet.algorithms.")]


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


@functools.cache
def ours(source: str) -> list[str]:
    """Every module of fedfleet that a source imports."""
    found = [name for name in imported(source) if under(name, "fedfleet")]
    return [name if name in MODULES else name.rpartition(".")[0] for name in found]


def under(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def allowed(room: str) -> list[str]:
    """What a room says it may import, in the docstring of its package, or for want of one of its registry."""
    where = room if room in MODULES else f"{room}.registry"
    (said,) = re.findall(r"^May import: (.*)\.$", ast.get_docstring(ast.parse(SOURCES[where])) or "", re.M)
    return [] if said == "nothing else" else [f"fedfleet.{name}" for name in said.split(", ")]


def may(name: str, rule: str) -> bool:
    """Whether a rule, a room or a module or all that is below ``room.*``, lets a module be imported."""
    return under(name, rule[:-2]) if rule.endswith(".*") else rule in (name, name.rpartition(".")[0])


def test_the_helpers_find_what_they_should():
    source = "import torch as t\ndef f():\n    from fedfleet.simulator.block import gradient\n    return torch.autograd.grad(1)"
    assert set(imported(source)) == {"torch", "fedfleet.simulator.block.gradient"}
    assert set(ours(source)) == {"fedfleet.simulator.block.gradient"}
    assert "torch.autograd.grad" in set(dotted(source))
    assert len(ALGORITHMS) > 15
    assert len(ROOMS) == 27
    assert may("fedfleet.simulator.work", "fedfleet.simulator")
    assert not may("fedfleet.simulator.block.block", "fedfleet.simulator")
    assert may("fedfleet.simulator.block.block", "fedfleet.simulator.*")


def test_a_room_imports_what_it_says_it_may(subtests):
    for room in ROOMS:
        with subtests.test(room):
            rules = allowed(room)
            for module in [m for m in MODULES if m.rpartition(".")[0] == room]:
                for name in ours(SOURCES[module]):
                    assert may(name, room) or any(may(name, rule) for rule in rules), f"{module} imports {name}"


def test_a_room_says_nothing_it_does_not_need(subtests):
    for room in ROOMS:
        with subtests.test(room):
            used = {name for m in MODULES if m.rpartition(".")[0] == room for name in ours(SOURCES[m])}
            for rule in allowed(room):
                assert any(may(name, rule) for name in used), f"{room} never imports {rule}"


def test_rooms_and_modules_go_round_in_no_circle():
    graph = {m: {n for n in ours(source) if n != m} for m, source in SOURCES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError
    buckets = {room: {rule.removesuffix(".*") for rule in allowed(room)} for room in ROOMS}
    TopologicalSorter(buckets).prepare()


def test_algorithms_take_gradients_through_ops_alone(subtests):
    for module in ALGORITHMS:
        with subtests.test(module):
            for name in dotted(SOURCES[module]):
                assert not under(name, "torch.autograd", "torch.func", "torch.no_grad", "torch.enable_grad"), name
                assert name.rsplit(".", 1)[-1] not in {"backward", "requires_grad_", "EngineOps"}, name


def test_every_module_is_type_checked():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]["include"]
    checked = {path for place in told for path in ROOT.glob(place if place.endswith(".py") else f"{place}/**/*.py")}
    assert not [name for name, path in MODULES.items() if path not in checked]


def test_an_author_imports_all_that_the_table_of_new_things_needs_from_one_module():
    assert {"Transform", "Encoding", "Reduction", "Rows", "Phase"} <= set(author.__all__)
    assert set(author.__all__) <= set(all_of_it.__all__)
    assert allowed("fedfleet.algorithms") == ["fedfleet.simulator.author"]


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
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")

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
@pytest.mark.own_ray
def test_hugging_face_datasets_is_not_hidden_from_ray_workers():
    theirs, ours = run(RAY_SCRIPT)
    assert theirs.name == "__init__.py"
    assert not theirs.is_relative_to(ROOT / "datasets")
    assert ours.samefile(ROOT / "datasets" / "registry.py")
