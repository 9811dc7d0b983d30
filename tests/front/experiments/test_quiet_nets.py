"""Nets that read sequences train many clients at once, by operations that all are vectorised: nothing warns of one that is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfleet

CONFIG = {
    "rounds": 1, "algorithm": {"steps": 1, "batch_size": 2}, "cohort": {"size": 3},
    "executor": {"kind": "local", "inner": "batched"},
}  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.out = getattr(nn, kind)(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0][:, -1])


class Attentive(nn.Module):
    """Attention that looks at the words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 8), nn.Linear(8, 2)
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = self.embedding(tokens)
        found, _ = self.layer(seen, seen, seen, key_padding_mask=~mask, need_weights=False)
        return self.out((mask[..., None] * found).sum(1))


class Counting(nn.Module):
    """A histogram of its weights, which torch has no vectorised rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.flatten(1)) + torch.histc(self.out.weight.detach(), 2)


CLIENT, Y = torch.arange(24) // 4, torch.arange(24) % 2


def sequences() -> Any:
    return fedfleet.data.from_arrays(torch.rand(24, 3, 4), Y, client=CLIENT)


def texts() -> Any:
    return fedfleet.data.from_texts([[i % 7] * (1 + i % 4) for i in range(24)], Y, client=CLIENT)


@pytest.fixture
def loud() -> Iterator[None]:
    """Every warning is an error, torch's own too, which come once a process otherwise."""
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize(("net", "data"), [
    (lambda: Recurrent("LSTM"), sequences), (lambda: Recurrent("GRU"), sequences), (Attentive, texts),
    (lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Flatten(),
     nn.Linear(12, 2)), sequences),
], ids=["LSTM", "GRU", "attention", "a transformer's layer"])  # fmt: skip
def test_nothing_warns(net: Callable[[], nn.Module], data: Callable[[], Any], tmp_path: Path) -> None:
    run = fedfleet.run(CONFIG, task=fedfleet.tasks.from_module(net), data=data(), out=tmp_path / "run")
    assert run.summary["status"] == "finished"


@pytest.mark.usefixtures("loud")
def test_an_operation_that_is_not_vectorised_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="have not yet implemented the batching rule for aten::histc"):
        fedfleet.run(CONFIG, task=fedfleet.tasks.from_module(Counting), data=sequences(), out=tmp_path / "run")
