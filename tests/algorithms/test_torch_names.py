"""Optimisers and schedules by the names and options that torch has for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedfleet.algorithms.options import ClientOptimizer, Schedule

SCHEDULES = [("StepLR", {"step_size": 3, "gamma": 0.5}), ("StepLR", {"step_size": 2}), ("ExponentialLR", {"gamma": 0.9}),
             ("CosineAnnealingLR", {"T_max": 9})]  # fmt: skip
OPTIMIZERS = [("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}), ("SGD", {}), ("Adagrad", {}),
              ("Adam", {"betas": (0.5, 0.9), "eps": 1e-3}), ("Adam", {}), ("AdamW", {}),
              ("AdamW", {"betas": (0.5, 0.9), "weight_decay": 0.3})]  # fmt: skip


@pytest.mark.parametrize(("name", "given"), SCHEDULES)
def test_a_schedule_is_torchs(name: str, given: dict[str, Any]):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = getattr(torch.optim.lr_scheduler, name)(optimizer, **given)
    ours = Schedule.model_validate({"kind": name, **given})
    for t in range(9):
        assert ours.at(t) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(("name", "given"), OPTIMIZERS)
@pytest.mark.parametrize("prefix", ["", "torch.optim."])
def test_an_optimiser_is_torchs(name: str, given: dict[str, Any], prefix: str):
    leaf = torch.tensor([1.0, -2.0], dtype=torch.float64)
    theirs = leaf.clone()
    optimizer = getattr(torch.optim, name)([theirs], lr=0.1, **given)
    ours = ClientOptimizer.model_validate({"name": prefix + name, **given}).build()
    state = ours.init({"w": leaf})
    for _ in range(3):
        direction, state = ours.update(state, {"w": 3 * leaf + 1e-6}, {"w": leaf})
        theirs.grad = 3 * theirs + 1e-6
        optimizer.step()
        leaf = leaf - 0.1 * direction["w"]
        torch.testing.assert_close(leaf, theirs, rtol=1e-6, atol=0)


def test_an_option_that_is_another_here_is_named():
    with pytest.raises(ValidationError, match="no option eta_min here: give floor"):
        Schedule.model_validate({"kind": "CosineAnnealingLR", "T_max": 9, "eta_min": 0.1})


def test_an_option_that_torch_wants_is_wanted():
    for name, given in SCHEDULES:
        needed = next(iter(given))
        with pytest.raises(ValidationError, match=f"{name} needs {needed}: give it"):
            Schedule.model_validate(name)


@pytest.mark.parametrize("given", ["NAdam", {"name": "Adam", "betas": 0.9}, {"name": "SGD", "betas": (0.5, 0.9)}])
def test_what_has_no_counterpart_is_refused(given):
    with pytest.raises(ValidationError):
        ClientOptimizer.model_validate(given)
    assert ClientOptimizer.model_validate("Adam") == ClientOptimizer.model_validate("adam")
    decay = ClientOptimizer.model_validate("adamw")
    assert ClientOptimizer.model_validate(decay.model_dump(mode="json")).weight_decay == decay.weight_decay == 0.01
    assert ClientOptimizer.model_validate({"name": "AdamW", "weight_decay": 0.0}).weight_decay == 0.0


def test_an_option_that_torchs_class_has_not_is_refused_with_those_that_it_has():
    for of, given, options in [
        (Schedule, {"kind": "StepLR", "stepsize": 5}, "step_size, gamma, floor, by"),
        (Schedule, {"kind": "ExponentialLR", "last_epoch": 5}, "gamma, floor, by"),
        (ClientOptimizer, {"name": "Adam", "amsgrad": True}, "weight_decay, clip_norm, betas, eps"),
    ]:
        with pytest.raises(ValidationError, match=f"has no option .* here: choose among {options} "):
            of.model_validate(given)


@pytest.mark.parametrize(("of", "given", "known"), [
    (ClientOptimizer, "NAdam", "sgd, adam, adamw, adagrad, SGD, Adam, AdamW, Adagrad"),
    (Schedule, {"kind": "OneCycleLR", "max_lr": 0.1}, "constant, power, step, cosine, StepLR, "),
])  # fmt: skip
def test_a_name_that_is_unknown_is_refused_before_its_options(of, given, known):
    with pytest.raises(ValidationError, match=f"is unknown: choose one of {known}"):
        of.model_validate(given)
