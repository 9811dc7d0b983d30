"""Every transform by the name used in configurations: a line each."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedfleet.transforms.clip import Clip
from fedfleet.transforms.delta import Delta
from fedfleet.transforms.half import Brain, Half
from fedfleet.transforms.low_rank import LowRank
from fedfleet.transforms.quantised import Qsgd, Sign, Ternary, Uniform
from fedfleet.transforms.rotation import Rotation
from fedfleet.transforms.sparse import RandomK, TopK


class Entry(NamedTuple):
    """What a name stands for: its options, which are the transform, and one line for ``fedfleet list``."""

    options: type[Any]
    about: str


TRANSFORMS: dict[str, Entry] = {
    "clip": Entry(Clip, "norms bounded, of all that is sent together (McMahan et al. 2018)"),
    "top_k": Entry(TopK, "the largest coordinates of each slot, with their places (Stich et al. 2018)"),
    "random_k": Entry(RandomK, "coordinates drawn from a seed (ibid.)"),
    "qsgd": Entry(Qsgd, "a norm, signs and drawn levels (Alistarh et al. 2017)"),
    "ternary": Entry(Ternary, "TernGrad: -1, 0 or 1 times the largest (Wen et al. 2017)"),
    "sign": Entry(Sign, "signs times the mean absolute value (Karimireddy et al. 2019)"),
    "uniform": Entry(Uniform, "drawn points between the least and the largest (Suresh et al. 2017)"),
    "rotation": Entry(Rotation, "turned at random, for uniform to follow (ibid.)"),
    "low_rank": Entry(LowRank, "PowerSGD: matrices as products of two thin ones (Vogels et al. 2019)"),
    "fp16": Entry(Half, "IEEE half precision"),
    "bf16": Entry(Brain, "bfloat16"),
    "delta": Entry(Delta, "on the way down: the difference from what clients have (Gruntkowska et al. 2023)"),
}
