"""Every attack by the name used in configurations: a line each."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedfleet.attacks.base import NoAttack
from fedfleet.attacks.collusion import Alie, InnerProduct
from fedfleet.attacks.poison import Backdoor, LabelFlip
from fedfleet.attacks.updates import Noise, Scaled, SignFlip


class Entry(NamedTuple):
    """What a name stands for: its options, which are the attack, and one line for ``fedfleet list``."""

    options: type[Any]
    about: str


ATTACKS: dict[str, Entry] = {
    "none": Entry(NoAttack, "nobody attacks"),
    "label_flip": Entry(LabelFlip, "wrong labels, of all classes or of one (Tolpegin et al. 2020)"),
    "backdoor": Entry(Backdoor, "a pattern that brings a label, model replacement (Bagdasaryan et al. 2020)"),
    "sign_flip": Entry(SignFlip, "updates the other way round"),
    "scaled": Entry(Scaled, "updates longer than they are"),
    "noise": Entry(Noise, "normal noise in the place of updates (Blanchard et al. 2017)"),
    "alie": Entry(Alie, "a little off the mean, together (Baruch et al. 2019)"),
    "inner_product": Entry(InnerProduct, "the mean the other way round, together (Xie et al. 2019)"),
}
