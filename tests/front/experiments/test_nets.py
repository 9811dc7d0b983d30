"""Nets that keep statistics: refused before the run begins, in every way to compute, since no two ways would agree."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fedfleet
from fedfleet.simulator.work import Objective
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.losses import cross_entropy
from fedfleet.tasks.options import DataShape, ModelOptions

CONFIG = {
    "rounds": 1, "population": {"clients": 20}, "cohort": {"size": 3}, "algorithm": {"batch_size": 5, "steps": 2},
    "executor": {"kind": "local"},
}  # fmt: skip


class Normed(Classification):
    """A net with a layer of one's own choice before the last; the loss trains it, evaluation has it as ``evaluated``."""

    def __init__(self, layer, *, trained=True, evaluated=False):
        super().__init__(ModelOptions(), DataShape((1, 8, 8), 10))
        self._net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), layer, nn.Linear(8, 10))
        self._trained, self._evaluated = trained, evaluated
        self.objectives = {"train": Objective(loss=self._loss_of, sign={"x": 1})}
        self.functions = {"predict": self._predict}

    def init(self, seed):
        torch.manual_seed(seed)
        return {"x": {name: p.detach().clone() for name, p in self._net.named_parameters()}}

    def _call(self, z, x, mode):
        self._net.train(mode)
        return functional_call(self._net, z["x"], (x,))

    def _loss_of(self, z, batch, ctx, key):
        return batch.mean(cross_entropy(self._call(z, batch.x, self._trained), batch.y)), {}

    def _predict(self, z, batch):
        return self._call(z, batch.x, self._evaluated)


@pytest.mark.parametrize("inner", ["auto", "serial", "batched", "factored"])
@pytest.mark.parametrize(("layer", "says"), [(nn.BatchNorm1d(8), "GroupNorm"), (nn.Dropout(0.5), "Dropout")])
@pytest.mark.parametrize("where", ["trained", "evaluated"])
def test_what_changes_under_way_is_refused_before_anything_is_written(tmp_path, inner, layer, says, where):
    task = Normed(layer, trained=where == "trained", evaluated=where == "evaluated")
    who = "client code" if where == "trained" else "the task's 'predict'"
    with pytest.raises(fedfleet.ClientError, match=rf"{who} (wrote|drew).*{says}") as e:
        fedfleet.run(CONFIG, {"executor.inner": inner}, task=task, out=tmp_path / "run")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_what_the_error_advises_works(tmp_path, inner):
    frozen = nn.BatchNorm1d(8)
    for layer, trained in ((nn.GroupNorm(2, 8), True), (frozen, False)):
        run = fedfleet.run(
            CONFIG, {"executor.inner": inner}, task=Normed(layer, trained=trained), out=tmp_path / type(layer).__name__
        )
        assert run.summary["bit_exact"]
    assert int(frozen.get_buffer("num_batches_tracked")) == 0
