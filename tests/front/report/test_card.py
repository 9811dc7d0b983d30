"""A run's model card says what hubs read and what people ask, and only where there is a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from fedfleet.report import own_loss, write_card, write_report
from fedfleet.report.card import CARD, NETS, card
from fedfleet.report.tables import read
from fedfleet.tasks import torch_losses
from fedfleet.tasks.registry import TASKS
from fedfleet.tasks.targets import LOSSES
from tests.front.report.report_runs import make_run


def head(text: str) -> dict:
    _, top, _ = text.split("---\n", 2)
    return yaml.safe_load(top)


def test_a_card_says_what_was_learnt_how_well_and_how_to_load_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "model.safetensors").touch()
    write_card(folder)
    text = (folder / CARD).read_text()
    metrics = [{"type": "accuracy", "name": "accuracy", "value": 0.5}]
    of = {"task": {"type": "classification"}, "dataset": {"type": "digits", "name": "digits"}, "metrics": metrics}
    assert head(text) == {
        "library_name": "fedfleet",
        "tags": ["federated-learning", "fedavg", "classification"],
        "model-index": [{"name": "fedavg on digits", "results": [of]}],
    }
    assert "# fedavg on digits\n\nfedavg learnt to classify examples of digits, held by 5 clients (iid)" in text
    assert "| metric | initial | final | best |\n| --- | --- | --- | --- |\n| accuracy | 0.1 | 0.5 | 0.625 |" in text
    for said in (
        "| algorithm | fedavg |",
        'fedfleet.open_run(".").model()',
        "`fedfleet run config.yaml` makes it again",
    ):
        assert said in text
    assert "of seed 0" in text
    assert "Nothing hides what clients' data were" in text


def test_what_does_not_hold_is_said(tmp_path: Path) -> None:
    promised = {"epsilon": 3.0, "delta": 1e-5, "accounting": "sampling"}
    said = {"status": "finished", "privacy": promised, "bit_exact": False, "own": {"task": {}}, "final": {}}
    config = {"algorithm": {"name": "a|b"}, "population": {"dataset": "digits"}}
    text = card(read(make_run(tmp_path / "run", rounds=None, summary=said, config=config)))
    left_out = ("Nothing hides", "fedfleet run", "open_run", "of seed")
    assert [words for words in left_out if words in text] == []
    for said in (
        "cannot be made again to the bit",
        "made in Python",
        'load_file("model.safetensors")',
        "Nothing was.",
        "a&#124;b",
    ):
        assert said in text
    assert "model-index" not in head(text)


def test_one_goes_on_with_the_optimiser_that_trained(tmp_path: Path) -> None:
    adam = {"name": "adam", "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.1}
    falls = {"kind": "step", "every": 3, "factor": 0.5}
    rows = {
        "SGD(net.parameters(), lr=0.2)\n": {"lr": 0.2},
        "SGD(net.parameters(), lr=0.05, momentum=0.9)  # lr of the last round; it was 0.2 in the first\n": {
            "of": {
                "lr": 0.2,
                "client_optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": False},
                "lr_schedule": falls,
            }
        },
        "Adam(net.parameters(), lr=0.2, betas=(0.8, 0.99), weight_decay=0.1)\n": {"lr": 0.2, "client_optimizer": adam},
        "AdamW(net.parameters(), lr=0.2, betas=(0.8, 0.99), eps=0.1, weight_decay=0.0)\n": {
            "lr": 0.2,
            "optimizer": {**adam, "name": "adamw", "eps": 0.1, "weight_decay": 0.0, "clip_norm": 2.0},
        },
    }
    for i, (wanted, options) in enumerate(rows.items()):
        config = {"task": {"name": "classification"}, "algorithm": {"name": "fedavg", **options}}
        said = {"status": "finished", "examples": {"shape": [2]}}
        run = read(make_run(tmp_path / str(i), rounds=None, summary=said, config=config))
        text = card(run, ("", "nn.Linear(2, 3)"), 0.25 if i == 1 else 1.0)
        assert ("    nn.utils.clip_grad_norm_(net.parameters(), 2.0)\n" in text) == (i == 3)
        assert f"optimizer = torch.optim.{wanted}" in text


def test_the_two_players_of_a_game_are_read_as_tensors(tmp_path: Path) -> None:
    game = {"seed": 0, "task": {"name": "auc"}, "algorithm": {"name": "coda"}}
    text = card(read(make_run(tmp_path / "run", config=game)))
    assert "open_run" not in text
    assert 'load_file("model.safetensors")' in text


@pytest.mark.slow
def test_runs_without_a_model_have_no_card_and_a_report_writes_none(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "all" / "a"), make_run(tmp_path / "all" / "b")
    write_card(first)
    for folder in (first, second):
        (folder / "model.safetensors").touch()
    write_report([first], first)
    write_report([tmp_path / "all"], tmp_path / "all")
    assert not list(tmp_path.rglob(CARD))
    built_in = {name for name, entry in TASKS.items() if hasattr(entry.build, "net")}
    assert set(NETS) == built_in | {"module"}  # which a function makes


def test_the_card_gives_torch_tensors_where_torch_takes_no_numbers() -> None:
    one = own_loss.OwnLoss("binary_cross_entropy_with_logits", {"pos_weight": 3.0}, summed=False, of_indices=False)
    several = one._replace(
        name="cross_entropy", options={"weight": [1.0, 2.0], "label_smoothing": 0.1}, of_indices=True
    )
    assert one.code().endswith("y.float(), pos_weight=torch.tensor(3.0))")
    assert several.code().endswith("net(x), y, weight=torch.tensor([1.0, 2.0]), label_smoothing=0.1)")


def test_a_loss_by_name_is_torchs_to_the_last_digits(tmp_path: Path) -> None:
    """Labels of -100 are among tokens alone, whose lines leave them out example by example."""
    numbers, flags, classes = torch.randn(4, 3), torch.rand(4, 3).round(), torch.tensor([0, 2, 1, 1])
    tokens = torch.tensor([[0, 2, 1], [1, -100, -100], [2, 2, -100], [-100, -100, -100]])
    shapes = {
        "cross_entropy": ((4, 3), classes),
        "token_cross_entropy": ((4, 3, 3), tokens),
        "bce_with_logits": ((4, 3), flags),
    }
    for name, loss in LOSSES.items():
        shape, y = shapes.get(name, ((4, 3), numbers))
        outputs = torch.randn(shape)
        path = f"torch.nn.functional:{own_loss.NAMED[name]}"
        of_paths = ({"name": "module", "loss": path},) if name != "token_cross_entropy" else ()
        for task in ({"name": "module", "loss": name}, *of_paths):
            known = own_loss.read(read(make_run(tmp_path / name / task["loss"], config={"task": task})))
            assert known is not None
            found = eval(known.code(), {"nn": nn, "net": lambda x: x, "x": outputs, "y": y})
            torch.testing.assert_close(found, loss.each(outputs, y).mean(), rtol=1e-6, atol=0)
    assert {each.__name__: function for each, function in torch_losses.MODULES.items()} == own_loss.CLASSES
    assert {*own_loss.OF_INDICES} == {name for name, kind in torch_losses.KINDS.items() if kind.of_indices}
    for each in (
        "torch.nn:HuberLoss",
        "torch.nn:CTCLoss",
        "torch.nn:MSELoss.forward",
        "mine:mse",
        "torch.nn.functional:relu",
    ):
        known = own_loss.read(read(make_run(tmp_path / each, config={"task": {"name": "module", "loss": each}})))
        assert (known is not None) == (each == "torch.nn:HuberLoss")
