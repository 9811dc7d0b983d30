"""Every attack by the name used in configurations: a line each."""

from __future__ import annotations

from typing import Any

from fedfleet.middleware.attacks.kinds.base import NoAttack
from fedfleet.middleware.attacks.kinds.collusion import Alie, InnerProduct
from fedfleet.middleware.attacks.kinds.poison import Backdoor, LabelFlip
from fedfleet.middleware.attacks.kinds.updates import Noise, Scaled, SignFlip
from fedfleet.simulator.author import Entry, Registry

ROWS: dict[str, Entry[Any]] = {
    "none": Entry(NoAttack, about="nobody attacks"),
    "label_flip": Entry(LabelFlip, about="wrong labels, of all classes or of one (Tolpegin et al. 2020)"),
    "backdoor": Entry(Backdoor, about="a pattern that brings a label, model replacement (Bagdasaryan et al. 2020)"),
    "sign_flip": Entry(SignFlip, about="updates the other way round"),
    "scaled": Entry(Scaled, about="updates longer than they are"),
    "noise": Entry(Noise, about="normal noise in the place of updates (Blanchard et al. 2017)"),
    "alie": Entry(Alie, about="a little off the mean, together (Baruch et al. 2019)"),
    "inner_product": Entry(InnerProduct, about="the mean the other way round, together (Xie et al. 2019)"),
}
ATTACKS = Registry("attack", ROWS, default="none")
