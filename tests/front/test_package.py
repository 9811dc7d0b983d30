"""The wheel holds everything and works away from the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fedfleet

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"  # building leaves files behind, so not in the repository itself
    source.mkdir()
    for name in ("src", "simulator", "algorithms", "datasets", "tasks", "transforms", "attacks"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, cwd=out)
    return next(out.glob("fedfleet-*.whl"))


def test_the_names_of_the_package_are_there_and_no_others():
    assert set(fedfleet.__all__) <= set(dir(fedfleet))
    for name in fedfleet.__all__:
        assert getattr(fedfleet, name).__name__ == name
    assert {*fedfleet.HOMES} <= {*fedfleet.__all__}
    with pytest.raises(AttributeError, match="module 'fedfleet' has no attribute 'nonsense'"):
        _ = fedfleet.nonsense


def test_the_wheel_holds_every_module_once(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("simulator", "algorithms", "datasets", "tasks", "transforms", "attacks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"fedfleet/{path.relative_to(ROOT)}" in names
    assert {"fedfleet/py.typed", "fedfleet/report/report.html.j2", "fedfleet/commands/cli.py"} <= names
    assert not [n for n in names if n.startswith(("simulator/", "datasets/", "tests/"))]


def test_the_wheel_runs_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    code = (
        "import fedfleet; print(fedfleet.__file__);"
        "fedfleet.run({'rounds': 2, 'population': {'clients': 20}, 'executor': {'kind': 'local'}}, out='run')"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().startswith(str(site))
    assert (tmp_path / "run" / "model.safetensors").exists()
