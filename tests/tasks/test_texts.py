"""Texts of several lengths: what follows after the end of one changes no loss, gradient, metric or count, whoever reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import fedfleet
from fedfleet.data import from_texts
from fedfleet.datasets.vocabulary import PADDING
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.work import Batch
from fedfleet.tasks import from_module
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.language import LanguageModel, LanguageOptions
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.stateful import inputs
from tests.refusals import all_say

WORDS, CLIENTS = 9, 2
LENGTHS = [5, 2, 7, 3, 3, 6, 1, 4]
TOKENS = [(rng.bits(rng.key(i), n) % WORDS).tolist() for i, n in enumerate(LENGTHS)]
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])


def tokens(width: int, rows: list[list[int]] = TOKENS) -> Tensor:
    return torch.stack([F.pad(torch.tensor(row), (0, width - len(row)), value=PADDING) for row in rows])


class Read(nn.Module):
    """Attention over what is there; with ``each`` logits for every token, of those up to it alone."""

    def __init__(self, words: int = WORDS, classes: int = 2, each: bool = False):
        super().__init__()
        self.embedding, self.score, self.out = nn.Embedding(words, 6), nn.Linear(6, 1), nn.Linear(6, classes)
        self.norm, self.each = nn.BatchNorm1d(6), each

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        seen = self.embedding(tokens)
        if self.each:
            return self.out((seen * mask[..., None]).cumsum(1))
        weight = self.score(seen)[..., 0].masked_fill(~mask, -torch.inf).softmax(1)
        return self.out(self.norm((weight[..., None] * seen).sum(1)))


class Careless(Read):
    """Takes the mean over all places."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.embedding(tokens).mean(1))


class Fixed(Read):
    """Takes texts of one length alone."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.embedding(tokens)[:, [len(LENGTHS) - 2]].mean(1))


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "eos_token_id": 1, "bos_token_id": 1},
    "gpt2, no more words": {"n_layer": 1, "n_head": 2, "n_embd": 8, "eos_token_id": 1, "vocab_size": WORDS},
    "roberta": {**SMALL, "max_position_embeddings": 32},
    "deberta-v2": SMALL,
}


def task(kind: str, folder: Path) -> Any:
    shape = DataShape((7,), 2, WORDS)
    if kind in TRANSFORMERS:
        (folder / "net.json").write_text(json.dumps({"model_type": kind.partition(",")[0], **TRANSFORMERS[kind]}))
        return Classification(ClassificationOptions(model=f"transformers:{folder / 'net.json'}"), shape)
    path = f"{__name__}:Read"
    return {
        "bag": lambda: Classification(ClassificationOptions(model="bag", hidden=(5,)), shape),
        "own": lambda: Classification(ClassificationOptions(model=path), shape),
        "module": lambda: from_module(Read),
        "lstm": lambda: LanguageModel(LanguageOptions(hidden=4, layers=2), shape),
        "own words": lambda: LanguageModel(LanguageOptions(model=path, arguments={"each": True}), shape),
    }[kind]()


NEEDED = pytest.mark.extras("transformers")
KINDS = ["bag", "own", "module", "lstm", "own words", *(pytest.param(kind, marks=NEEDED) for kind in TRANSFORMERS)]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(tmp_path: Path, kind: str):
    """Neither of one client nor of several at once, whose models differ, with a row that only fills its batch up."""
    made = task(kind, tmp_path)
    ops = EngineOps(made.objectives, made.functions)
    z = T.map(lambda leaf: torch.stack([leaf, leaf + leaf.abs() / 4]), made.init(3))
    weight = torch.tensor([1.0, 1, 1, 0])

    def found(width: int) -> Any:
        def one(z: Any, x: Tensor, y: Tensor, key: Tensor) -> Any:
            batch = Batch({"x": x, "y": y}, weight)
            each = [made.functions[name](z, batch) for name in ("per_example", "features") if name in made.functions]
            return ops.grad("train", z, batch, key), made.functions["predict"](z, batch), each

        x, y = tokens(width).view(CLIENTS, 4, width), LABELS.view(CLIENTS, 4)
        with torch.no_grad():
            return torch.func.vmap(one)(z, x, y, rng.fold(rng.key(0), torch.arange(CLIENTS)))

    tight, wide = found(7), found(12)
    assert any(leaf.abs().max() > 0.01 for leaf in T.leaves(tight[0][0]))
    for a, b in zip(T.leaves(tight), T.leaves(wide), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@NEEDED
def test_transformers_have_a_token_for_padding_and_one_for_every_word(tmp_path: Path):
    for kind, words, filling in (
        ("gpt2", WORDS + 1, WORDS),
        ("gpt2, no more words", WORDS, 1),
        ("roberta", WORDS + 1, WORDS),
    ):
        net = task(kind, tmp_path).net()
        assert (net.net.config.vocab_size, net.net.config.pad_token_id, net.filling) == (words, filling, filling)
    options = ClassificationOptions(model=f"transformers:{tmp_path / 'net.json'}", arguments={"vocab_size": WORDS - 1})
    with pytest.raises(fedfleet.ConfigError, match="its vocab_size=8 is below the 9 words of the data: raise it"):
        Classification(options, DataShape((7,), 2, WORDS))


def test_every_word_counts_alike_and_nothing_else():
    """Against torch's own cross-entropy on the texts one by one, none of which is padded."""
    made = LanguageModel(LanguageOptions(hidden=4, layers=1), DataShape((7,), WORDS, WORDS))
    z = made.init(0)
    batch = Batch({"x": tokens(9), "y": LABELS}, torch.tensor([1.0] * 7 + [0.0]))
    entropies, hits = [], []
    with torch.no_grad():
        for row in TOKENS[:7]:
            text = torch.tensor([row])
            logits = made._logits(z, text[:, :-1], None, None)[0][0] if len(row) > 1 else torch.zeros(0, WORDS)
            entropies.append(F.cross_entropy(logits, text[0, 1:], reduction="none"))
            hits.append(logits.argmax(-1) == text[0, 1:])
        loss, _ = made.objectives["train"].loss(z, batch, None, rng.key(0))
        sums = made.functions["predict"](z, batch)[:7]
        each = made.functions["per_example"](z, batch)
    every = torch.cat(entropies)
    assert len(every) == sum(n - 1 for n in LENGTHS[:7]) == int(sums[:, 2].sum())
    torch.testing.assert_close(loss, every.mean())
    metrics = made.metrics(sums, batch.data)
    assert metrics["loss"] == pytest.approx(float(every.double().mean()), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(float(torch.cat(hits).double().mean()))
    torch.testing.assert_close(each["loss"][0], entropies[0].mean())
    assert each["loss"][6] == 0  # of one word, which none follows
    torch.testing.assert_close(each["accuracy"][2], hits[2].float().mean())


def widened(data: Any, more: int) -> Any:
    """The same texts in tensors that are wider."""
    wider = lambda x: F.pad(x, (0, more), value=PADDING)  # noqa: E731
    people = data.population
    people = replace(people, data={**people.data, "x": wider(people.data["x"])})
    return replace(data, population=people, test=replace(data.test, x=wider(data.test.x)))


RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "words": ({"name": "language_model", "hidden": 6, "layers": 1}, True),
    "labels": ({"model": "bag", "hidden": [4]}, False),
    "own": ({"model": f"{__name__}:Read"}, False),
}


@pytest.mark.parametrize("which", RUNS)
@pytest.mark.slow
def test_a_run_is_the_same_with_more_padding(tmp_path: Path, which: str):
    chosen, foretell = RUNS[which]
    many = [row[: 2 + i % 5] * (1 + i % 3) + [i % WORDS] for i, row in enumerate(TOKENS * 6)]
    y = None if foretell else [i % 2 for i in range(len(many))]
    data = from_texts(many, y, client=[i % 8 for i in range(len(many))], test=0.25, words=WORDS)
    config = {
        "rounds": 2, "task": chosen, "algorithm": {"lr": 0.3, "batch_size": 4, "steps": 3}, "cohort": {"size": 4},
        "evaluation": {"every": 1, "per_client": True}, "executor": {"kind": "local", "inner": "batched"},
    }  # fmt: skip
    runs = [fedfleet.run(config, data=of, out=tmp_path / str(i)) for i, of in enumerate((data, widened(data, 5)))]
    one, other = (load_file(run.folder / "model.safetensors") for run in runs)
    for name, leaf in one.items():
        torch.testing.assert_close(other[name], leaf, rtol=1e-4, atol=1e-6, msg=name)
    columns = [c for c in runs[0].rounds if c == "train_loss" or c.startswith("eval/")]
    assert len(columns) > 2
    for column in columns:
        assert runs[1].rounds[column].tolist() == pytest.approx(runs[0].rounds[column].tolist(), rel=1e-5)
    counts = ["client_steps", "floats_up", "bytes_down", "completed"]
    assert runs[0].rounds[counts].equals(runs[1].rounds[counts])
    assert set(runs[0].table("clients")) == {"round", "client", "name", "accuracy", "loss"}
    if foretell:  # of each client, every word counts alike
        made = LanguageModel(
            LanguageOptions(**{k: v for k, v in chosen.items() if k != "name"}), DataShape((9,), WORDS, WORDS)
        )
        z = T.unflatten(made.init(0), [one[name] for name, _ in T.named_leaves(made.init(0))])
        table = runs[0].table("clients")
        for client in range(data.population.size):
            rows = data.population.local_data(torch.tensor([client])).rows[0]
            x = data.population.data["x"][rows]
            entropy = made.losses(z, x)[0].sum() / (x[:, 1:] >= 0).sum()
            assert table["loss"][(table["round"] == 1) & (table["client"] == client)].item() == pytest.approx(
                float(entropy), rel=1e-5
            )
    mine, others = (run.table("clients").select_dtypes("number").to_numpy() for run in runs)
    assert others == pytest.approx(mine, rel=1e-5)


def test_a_mask_is_for_nets_that_cannot_do_without():
    x = torch.tensor([[3, 0, PADDING]])
    tokens, mask = inputs(Read(), x)
    assert (tokens.tolist(), mask.tolist()) == ([[3, 0, 0]], [[True, True, False]])
    optional = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(2, 1, batch_first=True), 1
    )  # whose mask may be left out
    assert inputs(optional, x) == (x,)


class Packed(nn.Module):
    """Leaves the places after the end of a text out by packing."""

    def __init__(self, words, classes):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(words, 3), nn.LSTM(3, 3, batch_first=True)
        self.out = nn.Linear(3, classes)

    def forward(self, tokens, mask):
        given = self.embedding(tokens), mask.sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(*given, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


class Unmasked(nn.Module):
    """Has no mask by the name that it has here."""

    def __init__(self, words, classes):
        super().__init__()
        self.embedding, self.out = nn.Embedding(words, 3), nn.Linear(3, classes)

    def forward(self, input_ids):
        return self.out(self.embedding(input_ids).sum(1))


CONFIG = {"rounds": 1, "algorithm": {"batch_size": 2}, "cohort": {"size": 2}, "executor": {"kind": "local"}}
NUMBERS = fedfleet.data.from_arrays(torch.zeros(20, 4), torch.arange(20) % 2, client=torch.arange(20) % 4)


def test_what_would_not_do_is_said_before_work(subtests, tmp_path):
    def call(row):
        given, data = row
        data = data or from_texts(TOKENS, LABELS, client=torch.arange(8) // 2, test=0.25, words=WORDS)
        fedfleet.run(CONFIG, {"task": given}, data=data, out=tmp_path / "run")

    rows = [
        (({"model": "mlp"}, None), "task.model='mlp': model 'mlp' takes no text"),
        (({"model": "bag"}, NUMBERS), "task.model='bag': model 'bag' takes text alone"),
        (({"model": "bag", "hidden": [3, 3]}, None), "vectors of one width, and hidden=[3, 3]: give one number"),
        (({"model": "bag", "hidden": [3], "init": "zero"}, None), "leave init out"),
        (({"name": "auc", "model": "mlp"}, None), "task.name='auc'"),
        (({"model": f"{__name__}:Careless"}, None), "what follows after the end of a text changes its outputs"),
        (({"model": f"{__name__}:Packed"}, None), "sequences are not packed here: give the layer all places"),
        (({"model": f"{__name__}:Unmasked"}, None), "-1 after the end of a text"),
        (({"model": f"{__name__}:Fixed"}, None), "it takes 7 tokens and not 6"),
        (({"model": f"{__name__}:Read"}, NUMBERS), "a mask is for texts, and examples are torch.float32"),
    ]  # fmt: skip
    all_say(subtests, call, rows)


def test_a_net_comes_back_with_its_words(tmp_path: Path):
    data = from_texts(["a b", "b c d", "d a", "c"] * 4, [0, 1, 0, 1] * 4, test=0.25)
    given = {"task": {"model": "bag", "hidden": [3]}, "population": {"clients": 3, "partition": "iid"}}
    run = fedfleet.run({**CONFIG, **given}, data=data, out=tmp_path / "run")
    net = fedfleet.Run(run.folder, run.summary).model()
    assert net.embedding.weight.shape == (5, 3)
    assert net(torch.tensor([[1, 2]]), torch.tensor([[True, False]])).shape == (1, 2)
