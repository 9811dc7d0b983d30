"""Hugging Face's transformers as nets, ``transformers:PATH``: of a configuration with random weights, or a folder with its own.

PATH is a JSON file, ``{"model_type": "gpt2", "n_layer": 2, …}``, or a folder with ``config.json`` and ``model.safetensors``.
Nothing is downloaded, no code of a folder is run, and weights are read from safetensors alone. Attention is computed by plain
operations (``attn_implementation="eager"``), since clients are trained many at once, and all dropout of the configuration is 0,
for attention's draws from torch's generator; ``adapters.dropout`` draws from keys.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.tasks.maker import Maker

PREFIX = "transformers:"
HEADS = ("classifier", "pre_classifier", "score")
"""What classifiers call the layers that no pretrained folder has; but for the second, as in PEFT."""
Use = Literal["classify", "foretell"]
TASKS = {"classify": "SEQ_CLS", "foretell": "CAUSAL_LM"}


def is_transformer(model: str | None) -> bool:
    """Say whether a task's model is a transformer by its configuration."""
    return model is not None and model.startswith(PREFIX)


def source(model: str) -> str:
    """Return a digest of the configuration that a model is named by. Raises ConfigError."""
    return digest(json.dumps(_read(model, f"task.model={model!r}"), sort_keys=True), {})


INSIDE = "net."
"""What the names of a transformer's layers begin with in ``Logits``."""


class Logits(nn.Module):
    """A transformer that takes tokens (B, T), or images (B, channels, height, width), to logits, (B, classes) or (B, T, words).

    ``task`` is what PEFT calls it, None where it has no name for it: of images.
    """

    def __init__(self, net: nn.Module, task: str | None):
        super().__init__()
        self.net, self.task = net, task

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; every token counts, also one for padding."""
        return self.net(pixel_values=x).logits if self.task is None else self.net(input_ids=x.long()).logits


def of_configuration(
    model: str, arguments: Mapping[str, Any] | None, use: Use, classes: int, key: str = "task"
) -> Maker:
    """Return the maker of a transformer; ``classes`` are labels to tell apart, or words. Raises ConfigError.

    ``arguments`` take the place of what the configuration says.
    """
    said = f"{key}.model={model!r}"
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{said}: transformers is not installed: pip install 'fedfleet[transformers]', or take another model"
        )
    made = _Made(model, said, {**_read(model, said), **(arguments or {})}, use, classes)
    made.check(arguments or {}, f"{key}.arguments")
    return Maker(made, said, f"{key}.arguments")


class _Made:
    """Makes a transformer. A class, since a Maker is sent to workers."""

    def __init__(self, model: str, said: str, given: Mapping[str, Any], use: Use, classes: int):
        self.__name__ = model
        self._said, self._given, self._use, self._classes = said, dict(given), use, classes
        path = Path(model.removeprefix(PREFIX))
        self._folder = path.absolute() if path.is_dir() else None

    def check(self, arguments: Mapping[str, Any], key: str) -> None:
        """Refuse names that the configuration has not, which it would keep and ignore. Raises ConfigError."""
        import transformers

        config = self._config(transformers)
        known = {*type(config)().to_dict(), *type(config).attribute_map}
        for name, value in arguments.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise ConfigError(f"{key}.{name}={value!r}: {type(config).__name__} has no such key: {hint}")

    def __call__(self) -> nn.Module:
        import transformers  # here, for it takes seconds to import

        config = self._config(transformers)
        kinds = [transformers.AutoModelForCausalLM]
        if self._use == "classify":
            kinds = [transformers.AutoModelForSequenceClassification, transformers.AutoModelForImageClassification]
        auto = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
        if auto is None:
            raise ConfigError(
                f"{self._said}: transformers has no {config.model_type} that can {self._use}: take another model_type"
            )
        of_images = auto is transformers.AutoModelForImageClassification
        made: Any = {"attn_implementation": "eager"}
        if self._folder is None or torch.get_default_device().type == "meta":
            net = auto.from_config(config, **made).float()
        else:
            made |= {
                "use_safetensors": True,
                "local_files_only": True,
                "trust_remote_code": False,
                "dtype": torch.float32,
            }
            net = auto.from_pretrained(str(self._folder), config=config, **made)
        if self._use == "classify" and not of_images and net.config.pad_token_id is None:
            net.config.pad_token_id = -1  # no token, so that the last one is looked at
        return Logits(net, None if of_images else TASKS[self._use])

    def _config(self, transformers: Any) -> Any:
        given = dict(self._given)
        kind = given.pop("model_type", None)
        known = transformers.CONFIG_MAPPING
        if kind not in known:
            raise ConfigError(
                f"{self._said}: model_type={kind!r} is none of transformers {transformers.__version__}: give one, such as gpt2"
            )
        if self._use == "foretell":
            given.setdefault("vocab_size", self._classes)
        else:
            given["num_labels"] = self._classes
        for name in ("architectures", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id"):
            given.pop(name, None)
        config = known[kind](**given)
        config.use_cache = False
        for name, value in config.to_dict().items():
            if ("drop" in name) and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(config, name, 0.0)
        if self._use == "foretell" and config.vocab_size < self._classes:
            raise ConfigError(
                f"{self._said}: its vocab_size={config.vocab_size} is below the {self._classes} words of the data: raise it"
            )
        return config


def _read(model: str, said: str) -> dict[str, Any]:
    """Return the configuration of a file, or of a folder. Raises ConfigError."""
    file = Path(model.removeprefix(PREFIX))
    try:
        file = file / "config.json" if file.is_dir() else file
        found = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{said}: {file} is no configuration of a transformer ({one_line(e)}): give a JSON file, or a folder with config.json"
        ) from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise ConfigError(f"{said}: {file} does not say model_type: give a configuration of transformers")
    return found
