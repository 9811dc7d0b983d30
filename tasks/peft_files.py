"""Adapters as PEFT keeps them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, and a card.

Keys are PEFT's, ``base_model.model.<layer>.lora_A.weight``; layers that are learnt whole are its ``modules_to_save``.
``peft.PeftModel.from_pretrained(net, folder)`` puts them on the net without adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.tasks.adapters import Lora, is_conv1d
from fedfleet.tasks.options import AdapterOptions
from fedfleet.tasks.stateful import trainable
from fedfleet.tasks.transformer import INSIDE, Logits
from fedfleet.tasks.weights_file import read_weights

BEFORE = "base_model.model."
CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PLAIN = {"bias": ("none", None), "use_dora": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None)}
"""What else of PEFT's configuration changes what an adapter computes, and the values with which it does not."""
CARD = """---
library_name: peft
tags: [lora, federated-learning]
---

LoRA adapters of rank {rank}, scaled by {scale:g}, learnt by clients of a simulated federation (fedfleet).

- base: SHA-256 `{digest}` of names, types, shapes and elements of its `state_dict`
- adapters: {floats:,} floats beside {constants:,} that stayed as they were
- learnt whole: {full}

`peft.PeftModel.from_pretrained(base, folder)` loads them.
"""


def write(folder: Path, net: nn.Module, options: AdapterOptions, digest: str) -> Path:
    """Write the adapters of a net, made with torch's own layers, as PEFT does. Raises ConfigError where names end alike."""
    inner, task = (net.net, net.task) if isinstance(net, Logits) else (net, None)
    layers = {name: layer for name, layer in inner.named_modules() if isinstance(layer, Lora)}
    beside = {name for name, _ in inner.named_parameters()} - {
        n for n, p in inner.named_parameters() if not p.requires_grad
    }
    full = sorted({name.rpartition(".")[0] for name in beside if not re.search(r"\.lora_[AB]\.weight$", name)})
    every = [name for name, _ in inner.named_modules()]
    for name in full:
        if alike := next((other for other in every if other.endswith(name) and other != name), None):
            raise ConfigError(
                f"{folder}: PEFT goes by the ends of names, and {alike!r} ends as {name!r} does, which is learnt whole: call the "
                f"layer otherwise"
            )
    said = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": None,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.scaling == "rslora",
        "fan_in_fan_out": any(is_conv1d(layer.base_layer) for layer in layers.values()),
        "target_modules": _targets([*layers], every),
        "modules_to_save": full or None,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }
    wanted = {
        f"{name}.lora_{m}.weight": getattr(layer, f"lora_{m}").weight for name, layer in layers.items() for m in "AB"
    }
    tensors = {
        **trainable(inner),
        **{name: leaf.detach() for name, leaf in wanted.items()},
    }  # A, too, where it is a constant
    folder.mkdir(parents=True, exist_ok=True)
    save_file({BEFORE + name: leaf.contiguous() for name, leaf in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    constants = sum(p.numel() for p in inner.parameters() if not p.requires_grad)
    told = {"rank": options.rank, "scale": options.scale, "digest": digest, "constants": constants}
    floats = sum(leaf.numel() for leaf in tensors.values())
    (folder / "README.md").write_text(CARD.format(**told, floats=floats, full=", ".join(full) or "nothing"))
    return folder


def read(folder: Path, net: nn.Module, options: AdapterOptions, key: str) -> dict[str, Tensor]:
    """Return what PEFT's folder holds by the names of a net's leaves. Raises ConfigError where it computes something else."""
    said = f"{key}={folder}"
    try:
        result: Mapping[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{said}: {CONFIG} cannot be read ({one_line(e)}): give a folder that PEFT or a run has written"
        ) from None
    wanted = {
        "peft_type": "LORA",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "use_rslora": options.scaling == "rslora",
    }
    for name, value in wanted.items():
        if result.get(name, False) != value:
            raise ConfigError(
                f"{said}: its {name} is {result.get(name)!r}, and here it is {value!r}: set task.adapters as the folder says"
            )
    for name, values in PLAIN.items():
        if name in result and result[name] not in values:
            raise ConfigError(
                f"{said}: its {name} is {result[name]!r}, which there is none of here: give plain LoRA adapters"
            )
    file = folder / WEIGHTS if (folder / WEIGHTS).exists() else folder / PICKLED
    inside = INSIDE if isinstance(net, Logits) else ""
    return {inside + name.removeprefix(BEFORE): leaf for name, leaf in read_weights(file, said).items()}


def _targets(layers: list[str], every: list[str]) -> list[str] | str:
    """Return the names of layers, which PEFT compares with the ends of names; a pattern where others end so."""
    if not any(name.endswith(f".{layer}") for name in every for layer in layers):
        return layers
    return "|".join(map(re.escape, layers))
