"""Wheel and source distribution hold everything, and the wheel works away from the repository."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import fedfleet

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("simulator", "algorithms", "datasets", "tasks", "middleware")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a source distribution, and of the wheel that is built of it."""
    out = tmp_path_factory.mktemp("built")
    source = out / "source"  # building leaves files behind, so not in the repository itself
    source.mkdir()
    for name in ("src", "configs", *FOLDERS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, cwd=out, capture_output=True)
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of an environment with the wheel alone, beside the packages that it needs from this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    needs = sysconfig.get_path("purelib")
    (where,) = home.glob("lib/python*/site-packages")
    (where / "needs.pth").write_text(f"{needs}\n", encoding="utf-8")  # a path, whose own .pth files do not count
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet"]
    (wheel,) = built.glob("fedfleet-*.whl")
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return home / "bin"


def test_the_names_of_the_package_are_there_and_no_others():
    assert set(fedfleet.__all__) <= set(dir(fedfleet))
    for name in fedfleet.__all__:
        assert getattr(fedfleet, name).__name__ == name
    assert {*fedfleet.HOMES} <= {*fedfleet.__all__}
    with pytest.raises(AttributeError, match="module 'fedfleet' has no attribute 'nonsense'"):
        _ = fedfleet.nonsense


@pytest.mark.slow
def test_wheel_and_source_hold_every_module_once(built):
    (wheel,), (source,) = built.glob("fedfleet-*.whl"), built.glob("fedfleet-*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(source) as tar:
        files = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
    in_source = {name.removeprefix("src/") for name in files}
    wanted = {
        "fedfleet/py.typed",
        *(f"fedfleet/report/report.{kind}" for kind in ("html.j2", "css", "js")),
        "fedfleet/commands/cli.py",
    }
    for folder in FOLDERS:
        wanted |= {f"fedfleet/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    wanted |= {f"fedfleet/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert not wanted - in_wheel
    assert not wanted - in_source
    assert {"pyproject.toml", "README.md", "LICENSE"} <= files
    for names in (in_wheel, files):
        assert not [n for n in names if n.startswith((*(f"{folder}/" for folder in (*FOLDERS, "configs")), "tests/"))]


@pytest.mark.slow
def test_the_metadata_says_what_the_package_is(built):
    (wheel,) = built.glob("fedfleet-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [each for each in opened.namelist() if each.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(opened.read(name))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("fedfleet", project["version"], "Apache-2.0")
    assert said["Requires-Python"] == project["requires-python"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert set(said.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    tested = {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11"}
    assert tested <= set(said.get_all("Classifier"))


@pytest.mark.slow
@pytest.mark.extras("twine")
def test_an_index_would_take_wheel_and_source(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.glob("fedfleet-*.*"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout


def test_one_version_is_told_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == version
    first = re.search(r"^## \[(.*?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first is not None
    assert first.groups() == (version, str(cited["date-released"]))
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text(encoding="utf-8")


IMPORTED = """
import importlib, os, pathlib, signal, sys, types
import asyncio, matplotlib.pyplot, multiprocessing.connection, optuna, pandas, pyarrow.parquet, ray, scipy.stats, torch, torchvision
for module in ("fcntl", "grp", "posix", "pwd", "resource", "termios", "tty"):
    sys.modules[module] = None
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda descriptor, how, size: None)
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "getuid", "pread", "pwrite", "sched_getaffinity", "pidfd_open"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "pthread_kill", "pthread_sigmask"):
    delattr(signal, name)
root = pathlib.Path(sys.argv[1])
import fedfleet
for room in fedfleet.LINKED:
    assert (root / "src" / "fedfleet" / room).is_file(), f"{room} is a link"
    for path in sorted((root / room).rglob("*.py")):
        name = ".".join(("fedfleet", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        found = importlib.import_module(name)
        assert pathlib.Path(found.__file__).is_relative_to(root), found.__file__
given = {"rounds": 2, "population": {"clients": 20}, "algorithm": "scaffold", "executor": {"kind": "local"}}
fedfleet.run(given, out=root / "run")
fedfleet.resume(root / "run", {"rounds": 3})
from fedfleet.commands.completing import built_in
assert "fedavg" in built_in()["algorithm"]
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone of Git's")
def test_a_clone_without_links_is_whole_too(tmp_path):
    """As Git makes one on Windows, where a link becomes a file of text, and without what Windows lacks: it is imported, runs, and
    makes a whole wheel."""
    clone = tmp_path / "clone"
    git = ["git", "clone", "--quiet", "-c", "core.symlinks=false", str(ROOT), str(clone)]
    subprocess.run(git, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    subprocess.run([sys.executable, "-c", IMPORTED, str(clone)], check=True, env=environment, cwd=tmp_path)
    assert (clone / "run" / "model.safetensors").exists()
    shutil.rmtree(clone / "run")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(clone)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    (wheel,) = tmp_path.glob("fedfleet-*.whl")
    modules = {f"fedfleet/{path.relative_to(clone)}" for room in FOLDERS for path in (clone / room).rglob("*.py")}
    assert not modules - set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_wheel_runs_from_another_folder(installed, tmp_path):
    code = (
        "import fedfleet; print(fedfleet.__file__);"
        "fedfleet.run({'rounds': 2, 'population': {'clients': 20}, 'executor': {'kind': 'local'}}, out='run')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def printed(*command):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert printed(installed / "fedfleet", "--version") == f"fedfleet {said}"
    assert "quickstart" in printed(installed / "fedfleet", "configs")
    assert printed(installed / "python", "-c", code).startswith(str(installed.parent))
    assert (tmp_path / "run" / "model.safetensors").exists()
