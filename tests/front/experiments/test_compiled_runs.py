"""A run whose blocks are compiled says that it is not reproducible to the bit, and comes to about the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

import fedfleet
from fedfleet.config import resolve
from fedfleet.simulator.block import capture
from fedfleet.simulator.block.compiled import compiler
from fedfleet.simulator.errors import ConfigError

CONFIG = {
    "rounds": 8, "population": {"dataset": "digits", "clients": 20},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5, "lr": 0.1}, "cohort": {"size": 8},
    "executor": {"kind": "local", "inner": "batched", "block_size": 4}, "evaluation": {"every": 8},
}  # fmt: skip


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.slow
def test_a_compiled_run_says_so(tmp_path, monkeypatch):
    made = []
    compiled = capture.compiled
    monkeypatch.setattr(capture, "compiled", lambda *given: made.append(given) or compiled(*given))
    monkeypatch.setattr(capture.Captures.__init__, "__defaults__", (0, False))
    plain, other = (fedfleet.run(CONFIG, {"executor.capture": c}, out=tmp_path / str(c)) for c in (True, "compiled"))
    assert len(made) == 1
    assert (plain.summary["bit_exact"], other.summary["bit_exact"]) == (True, False)
    events = [json.loads(line) for line in (other.folder / "events.jsonl").read_text().splitlines()]
    assert events == [{"round": 0, "event": "compiled", "bit_exact": False}]
    a, b = (load_file(run.folder / "model.safetensors") for run in (plain, other))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_compiling_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(resolve, "compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"executor\.capture=compiled: torch needs a C\+\+ compiler"):
        fedfleet.Experiment(fedfleet.load(CONFIG, {"executor.capture": "compiled"}))
