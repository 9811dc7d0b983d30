"""Every transform by the name used in configurations: a line each."""

from __future__ import annotations

from typing import Any

from fedfleet.middleware.compression.codecs.clip import Clip
from fedfleet.middleware.compression.codecs.delta import Delta
from fedfleet.middleware.compression.codecs.half import Brain, Half
from fedfleet.middleware.compression.codecs.low_rank import LowRank
from fedfleet.middleware.compression.codecs.quantised import Qsgd, Sign, Ternary, Uniform
from fedfleet.middleware.compression.codecs.rotation import Rotation
from fedfleet.middleware.compression.codecs.sparse import RandomK, TopK
from fedfleet.simulator.author import Entry, Registry

ROWS: dict[str, Entry[Any]] = {
    "clip": Entry(Clip, about="norms bounded, of all that is sent together (McMahan et al. 2018)"),
    "top_k": Entry(TopK, about="the largest coordinates of each slot, with their places (Stich et al. 2018)"),
    "random_k": Entry(RandomK, about="coordinates drawn from a seed (ibid.)"),
    "qsgd": Entry(Qsgd, about="a norm, signs and drawn levels (Alistarh et al. 2017)"),
    "ternary": Entry(Ternary, about="TernGrad: -1, 0 or 1 times the largest (Wen et al. 2017)"),
    "sign": Entry(Sign, about="signs times the mean absolute value (Karimireddy et al. 2019)"),
    "uniform": Entry(Uniform, about="drawn points between the least and the largest (Suresh et al. 2017)"),
    "rotation": Entry(Rotation, about="turned at random, for uniform to follow (ibid.)"),
    "low_rank": Entry(LowRank, about="PowerSGD: matrices as products of two thin ones (Vogels et al. 2019)"),
    "fp16": Entry(Half, about="IEEE half precision"),
    "bf16": Entry(Brain, about="bfloat16"),
    "delta": Entry(Delta, about="on the way down: the difference from what clients have (Gruntkowska et al. 2023)"),
}
TRANSFORMS = Registry("transform", ROWS, key="name", group="fedfleet.transforms")
