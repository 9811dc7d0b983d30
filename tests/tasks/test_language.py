"""The LSTM against torch's own, and what perplexity is."""

import math

import pytest
import torch
from torch import nn

from fedfleet.simulator.work import Batch
from fedfleet.tasks.language import LanguageModel, LanguageOptions
from fedfleet.tasks.options import DataShape
from tests.refusals import tells

TASK = LanguageModel(LanguageOptions(hidden=5, layers=2), DataShape((7,), 11))
WINDOWS = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(0))


def test_it_is_torchs_lstm():
    z = TASK.init(3)
    net = z["x"]
    lstm = nn.LSTM(5, 5, num_layers=2, batch_first=True)
    with torch.no_grad():
        for i in range(2):
            getattr(lstm, f"weight_ih_l{i}").copy_(net[f"input_{i}"])
            getattr(lstm, f"weight_hh_l{i}").copy_(net[f"hidden_{i}"])
            getattr(lstm, f"bias_ih_l{i}").copy_(net[f"bias_{i}"])
            getattr(lstm, f"bias_hh_l{i}").zero_()
        hidden, _ = lstm(net["embedding"][WINDOWS[:, :-1]])
        logits = hidden @ net["output"].T + net["output_bias"]
        wanted = nn.functional.cross_entropy(logits.flatten(0, 1), WINDOWS[:, 1:].flatten(), reduction="none").view(
            4, 6
        )
        found, right = TASK.losses(z, WINDOWS)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(right, logits.argmax(-1) == WINDOWS[:, 1:])


def test_perplexity_is_the_exponential_of_the_mean_over_words():
    z = TASK.init(0)
    batch = Batch({"x": WINDOWS, "y": torch.zeros(4, dtype=torch.int64)}, torch.ones(4))
    with torch.no_grad():
        entropy, right = TASK.losses(z, WINDOWS)
        found = TASK.metrics(TASK.functions["predict"](z, batch), batch.data)
        loss, _ = TASK.objectives["train"].loss(z, batch, None, torch.tensor(0))
        each = TASK.functions["per_example"](z, batch)
    assert found["loss"] == pytest.approx(float(entropy.double().mean()), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["accuracy"] == pytest.approx(float(right.double().mean()))
    assert float(loss) == pytest.approx(found["loss"], rel=1e-6)
    torch.testing.assert_close(each["loss"], entropy.mean(1))
    assert found["perplexity"] == pytest.approx(11, rel=0.1)  # nothing is learnt yet


def test_other_data_are_refused():
    tells(lambda: LanguageModel(LanguageOptions(), DataShape((1, 28, 28), 10)), "no windows of words", ValueError)
