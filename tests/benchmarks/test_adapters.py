"""Adapters are measured beside whole nets. Nothing is timed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from torch import nn

from benchmarks import adapters


class Here:
    """A pool of processes that is this process: a new one takes seconds to import torch."""

    def __init__(self, *_: Any, **__: Any):
        self.asked: list[tuple[Any, ...]] = []

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*given))
        return done


def test_adapters_are_measured_beside_whole_nets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(adapters, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(adapters, "CLIENTS", 3)
    monkeypatch.setattr(
        adapters, "NETS", {"mlp": lambda: nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))}
    )
    adapters.main(["--net", "mlp", "--turns", "1", "--json"])
    found = json.loads(capsys.readouterr().out)["mlp"]
    ways = [adapters.said(*way) for way in adapters.WAYS]
    assert list(found["ms"]) == list(found["grown_mb"]) == ways
    assert all(ms > 0 for ms in found["ms"].values())
    assert found["over"]["rank 8, batched"]["median"] == 1
    rank, whole = 8 * (784 + 16), 785 * 16 + 17 * 10
    assert list(found["floats_up"].values()) == [rank, rank, rank, whole, whole]
    adapters.main(["--turns", "1"])
    said = capsys.readouterr().out
    assert "mlp, 3 clients, one process, one thread" in said
    assert f"{rank:,} floats up" in said
