"""A run's model elsewhere: as an ONNX file with the net's outputs, and in plain torch by the lines of the model card."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfleet
from fedfleet.assembly import onnx_file
from fedfleet.tasks.maker import Maker
from tests.refusals import refused

GIVEN = {"rounds": 1, "population": {"clients": 4}, "cohort": {"size": 2}, "executor": {"kind": "local"}}
EXTRA = ("onnx", "onnxscript", "onnxruntime")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    falls = {"kind": "ExponentialLR", "gamma": 0.5}
    algorithm = {"lr": 0.25, "lr_schedule": falls}
    given = {**GIVEN, "task": {"name": "classification", "model": "cnn_bn"}, "algorithm": algorithm}
    return fedfleet.run(given, out=tmp_path_factory.mktemp("exported") / "run", progress=False)


def test_the_lines_of_the_card_give_the_net_and_go_on_with_it(run, monkeypatch):
    _, lines = re.findall(r"```python\n(.*?)```", (run.folder / "model_card.md").read_text(), re.S)
    assert len([line for line in lines.splitlines()[3:] if line.strip()]) <= 10
    monkeypatch.chdir(run.folder)
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6)
    names: dict[str, Any] = {"loader": []}
    exec(lines, names)
    expected, net = run.model(), names["net"].eval()
    assert torch.equal(net(x), expected(x))
    assert names["optimizer"].param_groups[0]["lr"] == 0.25 * 0.5 ** (GIVEN["rounds"] - 1)
    names["loader"] = [(x, y)]
    exec(lines, names)
    assert not torch.equal(names["net"][0].weight, expected[0].weight)


class Own(nn.Module):
    """A net that is not one layer after another, with a constant, and one layer under two names."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1), requires_grad=False)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
        self.again = self.body[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.body(x)


def test_the_lines_of_the_card_name_a_net_of_ones_own(tmp_path, monkeypatch):
    given = {**GIVEN, "task": {"model": f"{__name__}:Own"}}
    run = fedfleet.run(given, out=tmp_path / "run", progress=False)
    _, lines = re.findall(r"```python\n(.*?)```", (run.folder / "model_card.md").read_text(), re.S)
    assert f"from {__name__} import Own\n" in lines
    monkeypatch.chdir(run.folder)
    names: dict[str, Any] = {"loader": []}
    exec(lines, names)
    x = torch.randn(6, 1, 8, 8)
    assert torch.equal(names["net"](x), run.model()(x))


def test_what_makes_a_net_is_told_if_it_has_a_name():
    assert Maker(Own, "net", arguments={"classes": 3}).code() == (f"from {__name__} import Own", "Own(classes=3)")
    for make in (lambda: Own(), Own(), partial(Own, 3)):
        assert Maker(make, "net").code() is None
    assert Maker(Own, "net", norm="group").code() is None


def test_a_net_that_is_not_one_layer_after_another_has_no_lines():
    class More(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    assert onnx_file.code(nn.Sequential(nn.Linear(2, 1))) is not None
    assert onnx_file.code(nn.Linear(2, 1)) == "nn.Linear(in_features=2, out_features=1, bias=True)"
    for net in (
        More(nn.Linear(2, 1)),
        nn.MultiheadAttention(2, 1),
        nn.Sequential(nn.Sequential(nn.ReLU())),
        nn.Sequential(More()),
    ):
        assert onnx_file.code(net) is None


def test_what_cannot_be_exported_is_refused(run, tmp_path, monkeypatch):
    refused(lambda: run.export(tmp_path / "model.pt"), f"{tmp_path / 'model.pt'}: its name")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "fedfleet[onnx]" in refused(lambda: run.export(tmp_path / "model.onnx"), f"{tmp_path / 'model.onnx'}")


@pytest.mark.slow
@pytest.mark.extras(*EXTRA)
def test_a_file_gives_what_the_net_gives_for_any_number_of_examples(run, tmp_path):
    import onnxruntime

    file = run.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        x = torch.randn(rows, 1, 8, 8)
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.tensor(found), run.model()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.extras(*EXTRA)
def test_outputs_that_differ_leave_no_file(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(onnx_file, "_difference", lambda *given: 0.5)
    with pytest.raises(fedfleet.FedfleetError, match="differ"):
        onnx_file.export(nn.Linear(2, 1), (torch.randn(4, 2),), tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]
