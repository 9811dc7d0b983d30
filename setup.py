"""Places of the packages: below ``src``, five of them by links, which a clone on Windows has as files of text."""

import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
NAME = "fedfleet"
LINKED = ("algorithms", "datasets", "middleware", "simulator", "tasks")

packages = find_namespace_packages("src")
folders = {"": "src"}
lacking = [room for room in LINKED if not (ROOT / "src" / NAME / room).is_dir()]
if "editable_wheel" not in sys.argv:  # which goes by ``src``, from where the package finds the rest
    for room in lacking:
        packages += [f"{NAME}.{room}", *(f"{NAME}.{room}.{below}" for below in find_namespace_packages(room))]
        folders[f"{NAME}.{room}"] = room
setup(packages=packages, package_dir=folders)
