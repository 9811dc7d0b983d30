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

from fedfleet.files.documents import json_of
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.tasks.maker import Maker
from fedfleet.tasks.options import DataShape

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
    return digest(told(model), {})


def told(model: str) -> str:
    """Return the configuration that a model is named by, as JSON. Raises ConfigError."""
    return json.dumps(_read(model, f"task.model={model!r}"), sort_keys=True)


INSIDE = "net."
"""What the names of a transformer's layers begin with in ``Logits``."""


class Logits(nn.Module):
    """A transformer that takes tokens (B, T), or images (B, channels, height, width), to logits, (B, classes) or (B, T, words).

    ``task`` is what PEFT calls it, None where it has no name for it: of images. Of texts of several lengths ``filling`` is the
    token that is given in the place of -1, after their end.
    """

    def __init__(self, net: nn.Module, task: str | None, filling: int | None = None):
        super().__init__()
        self.net, self.task, self.filling = net, task, filling
        # Where attention looks both ways, transformers looks whether a mask (B, T) hides anything, which no vmap can; one of four
        # dimensions is added as it is.
        ways = [layer.is_causal for layer in net.modules() if hasattr(layer, "is_causal")]
        self._both_ways = bool(ways) and not any(ways)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; of texts nothing looks at what is after their end, where x is -1. Else every token counts."""
        if self.task is None:
            return self.net(pixel_values=x).logits
        if self.filling is None:
            return self.net(input_ids=x.long()).logits
        there = x >= 0
        mask = there.long()
        if self._both_ways:
            nowhere = torch.finfo(torch.float32).min
            mask = torch.where(there, 0.0, nowhere)[:, None, None].expand(-1, 1, x.shape[1], -1)
        return self.net(input_ids=torch.where(there, x, self.filling), attention_mask=mask).logits


def of_configuration(
    model: str, arguments: Mapping[str, Any] | None, use: Use, shape: DataShape, key: str = "task"
) -> Maker:
    """Return the maker of a transformer for data with labels to tell apart, or words. Raises ConfigError.

    ``arguments`` take the place of what the configuration says.
    """
    said = f"{key}.model={model!r}"
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{said}: transformers is not installed: pip install 'fedfleet[transformers]', or take another model"
        )
    made = _Made(model, said, {**_read(model, said), **(arguments or {})}, use, shape)
    made.check(arguments or {}, f"{key}.arguments")
    return Maker(made, said, f"{key}.arguments")


class _Made:
    """Makes a transformer. A class, since a Maker is sent to workers."""

    def __init__(self, model: str, said: str, given: Mapping[str, Any], use: Use, shape: DataShape):
        self.__name__ = model
        self._said, self._given, self._use, self._classes, self._words = (
            said,
            dict(given),
            use,
            shape.classes,
            shape.words,
        )
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
        if self._words:
            net.config.pad_token_id = _filling(net.config, self._words)
            return Logits(net, TASKS[self._use], net.config.pad_token_id)
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
        if self._words and self._folder is None:  # a token more, which no text has
            given.setdefault("vocab_size", self._words + 1)
            if given["vocab_size"] > self._words:
                given.setdefault("pad_token_id", self._words)
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
        words = self._words or (self._classes if self._use == "foretell" else 0)
        if words and config.vocab_size < words:
            raise ConfigError(
                f"{self._said}: its vocab_size={config.vocab_size} is below the {words} words of the data: raise it"
            )
        return config


def _filling(config: Any, words: int) -> int:
    """Return the token that stands after the end of a text: the one for that, or one that no text has, or the last of any."""
    known = (config.pad_token_id, words, getattr(config, "eos_token_id", None))
    return next((n for n in known if isinstance(n, int) and 0 <= n < config.vocab_size), 0)


def _read(model: str, said: str) -> dict[str, Any]:
    """Return the configuration of a file, or of a folder. Raises ConfigError."""
    file = Path(model.removeprefix(PREFIX))
    try:
        file = file / "config.json" if file.is_dir() else file
        result = json_of(file)
    except (OSError, ConfigError) as e:
        raise ConfigError(
            f"{said}: {file} is no configuration of a transformer ({one_line(e)}): give a JSON file, or a folder with config.json"
        ) from None
    if "model_type" not in result:
        raise ConfigError(f"{said}: {file} does not say model_type: give a configuration of transformers")
    return result
