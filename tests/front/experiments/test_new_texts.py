"""A net that was learnt on texts reads new ones by its run's vocabulary, and weights of another vocabulary are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import fedfleet
from fedfleet.datasets.vocabulary import VOCABULARY
from fedfleet.experiments.run import Run
from fedfleet.report import write_card
from tests.refusals import tells

GOOD, BAD = "a lovely film", "a dull film"
TEXTS = [f"{GOOD} it was" if i % 2 else BAD for i in range(80)]
LIKED = [i % 2 for i in range(80)]
CLIENT = [f"critic {i // 8}" for i in range(80)]
CONFIG: dict[str, Any] = {
    "rounds": 3, "task": {"model": "bag", "hidden": [8]}, "algorithm": {"lr": 1.0, "batch_size": 4},
    "cohort": {"size": 6}, "evaluation": {"per_client": True}, "executor": {"kind": "local"},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    data = fedfleet.data.from_texts(TEXTS, LIKED, client=CLIENT, test=0.2, length=4)
    return fedfleet.run(CONFIG, data=data, out=tmp_path_factory.mktemp("runs") / "first")


def other(**reading: Any) -> Any:
    """The same words, of which others are frequent."""
    texts = [f"{text} {'dull ' * 9}" for text in TEXTS]
    return fedfleet.data.from_texts(texts, LIKED, client=CLIENT, test=0.2, **reading)


def test_a_net_reads_new_texts_as_it_learnt_to(run: Run):
    opened = fedfleet.open_run(run.folder)
    tokens, mask = opened.encode([GOOD, "Dull! and never seen", "dull"])
    assert tokens.shape == (3, 4)  # cut off where the run's were
    assert (mask.sum(1).tolist(), opened.model()(tokens, mask).argmax(1).tolist()) == ([3, 4, 1], [1, 0, 0])
    alone = opened.model()(*opened.encode(["dull"]))
    torch.testing.assert_close(opened.model()(tokens, mask)[2:], alone)  # whatever stands beside it
    assert run.summary["examples"]["vocabulary"] == opened.vocabulary.digest  # pyright: ignore


def test_clients_own_metrics_have_their_names(run: Run):
    clients = pd.read_parquet(run.folder / "clients.parquet")
    known = fedfleet.data.from_texts(TEXTS, LIKED, client=CLIENT, test=0.2).names.clients
    assert clients["name"].tolist() == [*known]  # after the last round
    assert not any(path.name == "clients.parquet" for path in run.folder.glob("**/name*"))


def test_the_card_says_how_to_read_texts(run: Run):
    write_card(run.folder)
    told = (run.folder / "model_card.md").read_text()
    assert "run.encode([" in told
    assert "all data lay together" in told


def test_weights_that_read_other_numbers_are_refused(run: Run, tmp_path: Path):
    plain = run.save_state_dict(tmp_path / "plain.pt")
    run.model().load_state_dict(torch.load(plain, weights_only=True))
    for path in (run.folder / "model.safetensors", run.save_state_dict(tmp_path / "net.safetensors"), plain):
        config = {**CONFIG, "warm_start": str(path)}
        with pytest.raises(fedfleet.ConfigError, match=r"^warm_start=.*: it has .* another vocabulary \(\w{12}\) than"):
            fedfleet.run(config, data=other(), out=tmp_path / "refused")
        if path.parent == run.folder:
            config["warm_start"] = str(run.folder)  # its last model's
        again = fedfleet.run(config, data=other(tokenizer=f"vocabulary:{run.folder}"), out=tmp_path / path.stem)
        assert again.vocabulary.digest == run.vocabulary.digest
    torch.save(dict(torch.load(plain, weights_only=True)), tmp_path / "theirs.pt")  # as other programs write it
    assert fedfleet.run({**CONFIG, "warm_start": str(tmp_path / "theirs.pt")}, data=other(), out=tmp_path / "theirs")
    base = {"task": {**CONFIG["task"], "adapters": {"rank": 1, "base": str(run.folder)}}}
    tells(lambda: fedfleet.run({**CONFIG, **base}, data=other(), out=tmp_path / "refused"), "^task.adapters.base=")


def test_a_run_without_texts_has_none(tmp_path: Path):
    run = fedfleet.run(
        {**CONFIG, "rounds": 1, "population": {"clients": 20}, "task": {"model": "logistic"}}, out=tmp_path / "run"
    )
    assert not (run.folder / VOCABULARY).exists()
    assert run.vocabulary is None
    tells(lambda: run.encode(["a"]), "it read no texts, or numbers of tokens that others made")
