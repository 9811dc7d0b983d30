"""Systems without Ray: what needs it is refused in a line, and everything else runs."""

from types import SimpleNamespace

import pytest

from fedfleet.assembly.executors import on_ray
from fedfleet.config.platforms import without_ray
from fedfleet.config.schema import load
from fedfleet.experiments.child import child
from fedfleet.experiments.experiment import Experiment
from tests.refusals import refused

BASE = {"rounds": 100_000, "population": {"clients": 20}, "cohort": {"size": 4}}


@pytest.mark.parametrize("system", ["win32", "linux without Ray"])
def test_without_ray_its_features_are_refused_and_a_run_goes_on_in_this_process(monkeypatch, system):
    assert without_ray() is None
    if system == "win32":
        for module in ("config.platforms", "experiments.child"):
            monkeypatch.setattr(f"fedfleet.{module}.sys", SimpleNamespace(platform="win32"))
        refused(lambda: child("fedfleet", "run").__enter__(), "--jobs")
    else:
        monkeypatch.setattr("fedfleet.config.platforms.find_spec", lambda name: None)
    assert Experiment(load(BASE)).config.executor.kind == "local"
    refused(lambda: Experiment(load(BASE, {"executor.kind": "ray"})), "executor.kind='ray'")
    refused(lambda: Experiment(load(BASE, {"executor.actors": 2})), "executor.kind='auto'")
    refused(lambda: Experiment(load(BASE, {"faults.client_timeout_s": 5})), "executor.kind='auto'")
    refused(lambda: on_ray("ray"), "executor.kind='ray'")


def test_ray_that_cannot_be_imported_is_told_in_a_line(monkeypatch):
    def lacking(name):
        raise ImportError("libray.so: cannot open shared object file\nor another")

    monkeypatch.setattr("fedfleet.assembly.executors.imported", lacking)
    refused(lambda: on_ray("ray"), "executor.kind='ray'")
