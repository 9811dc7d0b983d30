"""Adapters: a round by hand, what travels, what a mean of them is, PEFT's folders, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import World, build, digits, records
from safetensors.torch import load_file, save_file
from test_personalised import heard, rows_of
from torch import nn

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Cohort
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.population import InMemoryPopulation, decode
from fedfleet.simulator.work import BatchPlan
from fedfleet.tasks import from_module
from fedfleet.tasks.adapters import Lora, plain
from tests.refusals import all_say, tells
from tests.tasks.own_nets import Normed

LR, B, STEPS = 0.2, 6, 3
PEOPLE = digits("classification", clients=8).population
DATA = {"x": decode(PEOPLE.data["x"]).double(), "y": PEOPLE.data["y"]}
CLIENTS = InMemoryPopulation(DATA, PEOPLE.indices, PEOPLE.offsets, torch.zeros(8, dtype=torch.int64))
ADAPTERS = {"rank": 3, "alpha": 5, "targets": ["1", "3"]}
CONFIG: dict[str, Any] = {
    "rounds": 1, "population": {"clients": 12, "partition": {"kind": "iid"}},
    "task": {"model": "mlp", "hidden": (12, 11), "adapters": {"rank": 3, "alpha": 5}},
    "algorithm": {"lr": 1.0, "batch_size": 8, "steps": 4}, "cohort": {"size": 4},
    "executor": {"kind": "local", "inner": "batched"},
}  # fmt: skip


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10, bias=False)).double()


def where(**adapters: Any) -> World:
    return World(from_module(net(), adapters={**ADAPTERS, **adapters}), CLIENTS)


def rounds_of(world: World, name: str = "fedavg", inner: str = "serial", rounds: int = 1, **options: Any) -> Any:
    algorithm = build(name, world.task, CohortOptions(size=5), batch_size=B, lr=LR, steps=STEPS, **options)
    return algorithm, list(records(algorithm, world, rounds, inner=inner, policy=First(3)))


def model(algorithm: Any, record: Any) -> dict[str, Any]:
    return algorithm.views["global"].params(record.state)["x"]


@pytest.mark.parametrize("inner", ["serial", "batched", "factored"])
@pytest.mark.parametrize("scaling", ["lora", "rslora"])
def test_rounds_are_those_of_plain_torch_and_the_base_stays(inner, scaling):
    world, base = where(scaling=scaling), net()
    before = world.task.make.digest()
    z = world.task.init(0)["x"]
    wide = {"1": (3, 64, 12), "3": (3, 12, 10)}
    assert {k: tuple(v.shape) for k, v in z.items()} == {
        f"{n}.lora_{m}.weight": (r, i) if m == "A" else (o, r) for n, (r, i, o) in wide.items() for m in "AB"
    }
    assert all(float(v.abs().max()) == 0 for k, v in z.items() if "lora_B" in k)
    assert 0.8 < float(z["1.lora_A.weight"].abs().max()) * 64**0.5 <= 1
    algorithm, found = rounds_of(world, inner=inner, rounds=2)
    scale = 5 / 3 if scaling == "lora" else 5 / 3**0.5

    def loss(p, rows):
        x = DATA["x"][rows].flatten(1)
        for name in ("1", "3"):
            layer, a, b = base[int(name)], p[f"{name}.lora_A.weight"], p[f"{name}.lora_B.weight"]
            x = F.linear(x, layer.weight + scale * b @ a, layer.bias)
            x = torch.tanh(x) if name == "1" else x
        return F.cross_entropy(x, DATA["y"][rows])

    for t, record in enumerate(found):
        key, total, ends = rng.fold(rng.key(0), "client", t, 0), 0.0, {k: torch.zeros_like(v) for k, v in z.items()}
        for c in heard(record):
            mine = {k: v.clone().requires_grad_() for k, v in z.items()}
            for (rows,) in rows_of(c, key, 0, BatchPlan(size=B, steps=STEPS), world):
                slopes = torch.autograd.grad(loss(mine, rows), [*mine.values()])
                mine = {
                    k: (v - LR * g).detach().requires_grad_() for (k, v), g in zip(mine.items(), slopes, strict=True)
                }
            n = float(CLIENTS.num_examples(torch.tensor(c)))
            total, ends = total + n, {k: v + n * mine[k].detach() for k, v in ends.items()}
        z = {k: v / total for k, v in ends.items()}
        got = model(algorithm, record)
        assert all(torch.allclose(got[k], z[k], rtol=0, atol=1e-12) for k in z)
        assert record.phases[0].counts["floats_up"] == 3 * T.count(z)
        assert record.phases[0].counts["bytes_up"] == 3 * T.num_bytes(z)
        assert record.phases[0].counts["floats_down"] == 5 * T.count(z)
    assert world.task.make.digest() == before


def test_a_mean_of_adapters_is_that_of_the_weights_if_one_matrix_alone_is_learnt(monkeypatch):
    def weights(world, record, algorithm):
        made = world.task.net()
        made.load_state_dict(model(algorithm, record), strict=False)
        return torch.cat([p.detach().flatten() for p in plain(made).parameters()])

    def away(**adapters):
        world, found = where(**adapters), []
        for who in ([0], [7], [0, 7]):
            monkeypatch.setattr(
                "fedfleet.simulator.driver.round.EngineRound.invite", lambda self, size, who=who: cohort(who)
            )
            algorithm = build("fedavg", world.task, batch_size=B, lr=LR, steps=9, weight="uniform")
            found.append(weights(world, next(records(algorithm, world, 1)), algorithm))
        one, other, both = found
        start = torch.cat([p.flatten() for p in net().parameters()])
        return ((both - (one + other) / 2).norm() / (both - start).norm()).item()

    def cohort(who):
        return Cohort(torch.tensor(who), torch.zeros(len(who), dtype=torch.int64))

    assert away(learn="B") < 1e-12
    assert away() > 1e-3


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "fedopt"])
def test_other_algorithms_run_on_adapters_alone(name):
    world = where()
    algorithm, alone = rounds_of(world, name, rounds=2)
    _, many = rounds_of(world, name, "batched", rounds=2)
    one, other = model(algorithm, alone[-1]), model(algorithm, many[-1])
    assert {*one} == {*world.task.init(0)["x"]}
    assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-12) for k in one)
    assert any(float(v.abs().max()) > 0 for k, v in one.items() if "lora_B" in k)


def test_all_seeds_share_one_base_in_memory_and_statistics_stay():
    task = from_module(lambda: Normed(10), adapters={"rank": 2, "targets": ["head"]})
    nets = [task.make(seed) for seed in (0, 1)]
    kept = [[*n.get_submodule("head").base_layer.parameters()] for n in nets]
    assert all(a is b for a, b in zip(*kept, strict=True))
    assert not torch.equal(nets[0].head.lora_A.weight, nets[1].head.lora_A.weight)
    assert task.parts == ("x",)
    assert torch.equal(task.make(1).head.lora_A.weight, nets[1].head.lora_A.weight)
    ours = plain(nets[0])
    assert ours.head.weight.data_ptr() != kept[0][0].data_ptr()
    assert not any(isinstance(layer, Lora) for layer in ours.modules())


def test_a_run_keeps_adapters_alone_and_goes_on_only_with_its_base(tmp_path):
    pre = fedfleet.run({**CONFIG, "task": {"model": "mlp", "hidden": (12, 11)}}, out=tmp_path / "pre")
    config = {**CONFIG, "task.adapters.base": str(tmp_path / "base.safetensors"), "task.adapters.full": ["5"]}
    save_file(pre.model().state_dict(), tmp_path / "base.safetensors")
    run = fedfleet.run(CONFIG, {k: v for k, v in config.items() if k not in CONFIG}, out=tmp_path / "run")
    names = {f"x.{n}.lora_{m}.weight" for n in "13" for m in "AB"} | {"x.5.weight", "x.5.bias"}
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == names
    saved = [load_file(f).keys() for f in (tmp_path / "run" / "checkpoints").rglob("*.safetensors")]
    assert not any("base_layer" in name for keys in saved for name in keys)
    theirs = pre.model().state_dict()
    assert all(torch.equal(v, theirs[k]) for k, v in run.model("base").state_dict().items())
    x = torch.rand(5, 1, 8, 8)
    assert (run.model()(x) - pre.model()(x)).abs().max() > 1e-3
    save_file({k: v + 1e-3 for k, v in theirs.items()}, tmp_path / "base.safetensors")
    with pytest.raises(ConfigError, match=r"^task\.adapters\.digest='[0-9a-f]{64}': the base has other weights by now"):
        fedfleet.resume(tmp_path / "run", {"rounds": 2})


def test_a_folder_of_peft_has_its_names_and_starts_a_run(tmp_path):
    run = fedfleet.run(CONFIG, {"task.adapters.full": ["5"]}, out=tmp_path / "run")
    folder = run.save_adapters(tmp_path / "peft")
    mine = load_file(tmp_path / "run" / "model.safetensors")
    assert {
        f"x.{k.removeprefix('base_model.model.')}": v.sum()
        for k, v in load_file(folder / "adapter_model.safetensors").items()
    } == {k: v.sum() for k, v in mine.items()}
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"], said["modules_to_save"]) == (3, 5, ["1", "3"], ["5"])
    digest = fedfleet.load(tmp_path / "run" / "config.yaml").task.adapters.digest
    assert digest in (folder / "README.md").read_text()
    again = {"warm_start": str(folder), "task.adapters.full": ["5"]}
    assert fedfleet.run(CONFIG, again, out=tmp_path / "again").summary["initial"] == run.summary["final"]
    for key, said in (("alpha", "lora_alpha is 5.0"), ("rank", "r is 3"), ("scaling", "use_rslora is False")):
        other = {**again, f"task.adapters.{key}": {"alpha": 6, "rank": 4, "scaling": "rslora"}[key]}
        with pytest.raises(ConfigError, match=f"^warm_start=.*: its {said}"):
            fedfleet.Experiment(fedfleet.load(CONFIG, other))


def as_peft_reads(run: Any, folder: Any, look: Any, least: float = 1e-3) -> tuple[Any, dict[str, Any]]:
    """Check that PEFT computes what a run has learnt; the run's base, and what PEFT is told."""
    import peft

    base = run.model("base")
    mine, before = look(run.model()), look(base)
    theirs = peft.PeftModel.from_pretrained(base, str(run.save_adapters(folder))).eval()
    assert torch.allclose(look(theirs), mine, rtol=0, atol=1e-6)
    assert (before - mine).abs().max() > least
    return base, json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize("scaling", ["lora", "rslora"])
@pytest.mark.extras("peft")
def test_peft_computes_what_a_run_has_learnt(tmp_path, scaling):
    run = fedfleet.run(CONFIG, {"task.adapters.full": ["5"], "task.adapters.scaling": scaling}, out=tmp_path / "run")
    x = torch.rand(9, 1, 8, 8)
    as_peft_reads(run, tmp_path / "peft", lambda net: net(x), 1e-2)


@pytest.mark.extras("peft", "transformers")
def test_a_language_model_of_hugging_face_learns_adapters_that_peft_reads(tmp_path):
    import transformers

    (tmp_path / "gpt2.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8})
    )
    words = fedfleet.Examples(
        rng.sample(rng.key(0), 11, 60 * 7, replace=True).view(60, 7), torch.zeros(60, dtype=torch.int64), 11
    )
    task = {
        "name": "language_model",
        "model": f"transformers:{tmp_path / 'gpt2.json'}",
        "adapters": {"rank": 2, "alpha": 3},
    }
    data = fedfleet.Dataset("words", words, words)
    run = fedfleet.run({**CONFIG, "task": task}, {"algorithm.batch_size": 2}, data=data, out=tmp_path / "run")
    base, said = as_peft_reads(run, tmp_path / "peft", lambda net: net(input_ids=words.x).logits)
    assert isinstance(base, transformers.GPT2LMHeadModel)
    assert base.config.vocab_size == 11
    assert (said["fan_in_fan_out"], said["task_type"]) == (True, "CAUSAL_LM")
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2}))
    with pytest.raises(ConfigError, match=r"^task\.source=.* is other by now"):
        fedfleet.resume(tmp_path / "run", {"rounds": 2}, data=data)


@pytest.mark.extras("peft", "transformers")
def test_a_transformer_of_images_learns_adapters_that_peft_reads(tmp_path):
    import transformers

    given = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8}
    given |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "vit.json").write_text(json.dumps(given))
    task = {"model": f"transformers:{tmp_path / 'vit.json'}", "adapters": {"rank": 2, "alpha": 3}}
    run = fedfleet.run({**CONFIG, "task": task}, out=tmp_path / "run")
    x = torch.rand(9, 1, 8, 8)
    assert run.model()(x).logits.shape == (9, 10)
    base, said = as_peft_reads(run, tmp_path / "peft", lambda net: net(pixel_values=x).logits)
    assert isinstance(base, transformers.ViTForImageClassification)
    assert said["task_type"] is None
    (tmp_path / "vit.json").write_text(json.dumps({"model_type": "clip_text_model"}))
    with pytest.raises(ConfigError, match=r"transformers has no clip_text_model that can classify: take another"):
        fedfleet.Experiment(fedfleet.load({**CONFIG, "task": task}))


def test_what_will_not_do_is_refused(subtests):
    rows = [
        ({"targets": ["7"]}, "targets='7': no linear layer is called so or ends so: take of 1, 3, 5"),
        ({"targets": ["2"]}, "targets='2': '2' is a ReLU: take of 1, 3, 5"),
        ({"base": "none.safetensors"}, "base=none.safetensors"), ({"targets": ["1"], "full": ["1"]}, "full: '1'"),
        ({"rank": 11}, "rank=11: layer '3' of 12 inputs and 11 outputs"), ({"digest": "0"}, "digest='0'"),
    ]  # fmt: skip
    rows = [({f"task.adapters.{k}": v for k, v in given.items()}, f"^task.adapters.{says}") for given, says in rows]
    all_say(subtests, lambda given: fedfleet.Experiment(fedfleet.load(CONFIG, given)), rows)


def test_nets_without_linear_layers_and_without_transformers_are_refused(monkeypatch, tmp_path):
    tells(lambda: from_module(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), adapters={}), "^adapters")
    last_left_out = from_module(net(), adapters={"rank": 2}).init(0)["x"]
    assert {*last_left_out} == {"1.lora_A.weight", "1.lora_B.weight"}
    tells(lambda: from_module(net(), adapters={"rank": 0}), "^from_module: adapters.rank=0:")
    with pytest.raises(ConfigError, match="adapters is not for the LSTM"):
        fedfleet.load({**CONFIG, "task": {"name": "language_model", "adapters": {}}})
    lost = {**CONFIG, "task": {"model": f"transformers:{tmp_path}"}}
    monkeypatch.setattr("fedfleet.tasks.transformer.find_spec", lambda name: None)
    tells(lambda: fedfleet.Experiment(fedfleet.load(lost)), "transformers is not installed")


@pytest.mark.extras("transformers")
def test_a_folder_without_a_configuration_is_no_transformer(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^task\.model='transformers:.*config\.json is no configuration of a transformer"
    ):
        fedfleet.Experiment(fedfleet.load({**CONFIG, "task": {"model": f"transformers:{tmp_path}"}}))
