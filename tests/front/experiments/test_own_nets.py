"""Nets named as ``module:name``: found, trained as built-in ones are, told by their code, refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.commands.plan import describe
from fedfleet.experiments import campaign, sweep
from fedfleet.experiments.progress import Progress
from fedfleet.report.groups import grouped
from fedfleet.report.tables import read
from fedfleet.simulator import named
from fedfleet.simulator.population import decode
from fedfleet.tasks import from_module
from tests.parts import slow_but
from tests.refusals import all_say, refused, tells
from tests.tasks import own_nets

CONFIG: dict[str, Any] = {
    "rounds": 2, "population": {"clients": 12, "partition": {"kind": "quantity_skew", "min_size": 3}},
    "task": {"name": "classification"}, "algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 4, "steps": 3},
    "cohort": {"size": 4}, "executor": {"kind": "local", "inner": "batched"}, "evaluation": {"every": 2},
}  # fmt: skip
HERE = "tests.tasks.own_nets:"
NET = """
import torch
from blocks_{0} import hidden

def make(width=8, *, shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), *hidden(64, width), torch.nn.Linear(width, classes))
"""
BLOCKS = """
import torch

def hidden(a, b):
    return torch.nn.Linear(a, b), torch.nn.{0}()
"""


@pytest.fixture
def folder(tmp_path, beside):
    """A folder beside the one that is run in, with a module of a name of its own, and a helper module."""
    found, modules = beside, set(sys.modules)
    name = "".join(c for c in tmp_path.name if c.isalnum())
    (found / f"net_{name}.py").write_text(NET.format(name))
    (found / f"blocks_{name}.py").write_text(BLOCKS.format("ReLU"))
    (found / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "task": {"model": f"net_{name}:make"}}))
    yield found
    forget(modules)


def forget(kept: set[str]) -> None:
    """Forget modules, as another process has not seen them."""
    for new in set(sys.modules) - kept:
        if new.startswith(("net_", "blocks_")):
            del sys.modules[new]


def weights(run: fedfleet.Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model.safetensors")


@pytest.mark.parametrize("inner", ["serial", "batched", "factored"])
def test_the_same_layers_by_path_are_the_built_in_net_to_the_byte(tmp_path, inner):
    given = {"executor.inner": inner}
    own, ours = (
        fedfleet.run(CONFIG, {"task.model": model, **given}, out=tmp_path / model.rpartition(":")[2] / inner / str(i))
        for i, model in enumerate((f"{HERE}logistic", "logistic"))
    )
    assert (own.folder / "model.safetensors").read_bytes() == (ours.folder / "model.safetensors").read_bytes()
    assert own.summary["final"] == ours.summary["final"]


@pytest.mark.parametrize("model", slow_but(["Normed", "Reader", "Attention", "Tied"], "Normed", "Tied"))
def test_many_at_once_are_one_at_a_time(tmp_path, model):
    found = {}
    for inner in ("serial", "batched", "factored"):
        given = {"task.model": HERE + model, "executor.inner": inner}
        found[inner] = weights(fedfleet.run(CONFIG, given, out=tmp_path / inner))
    for inner in ("batched", "factored"):
        for name, leaf in found["serial"].items():
            torch.testing.assert_close(found[inner][name], leaf, rtol=1e-3, atol=1e-5, msg=f"{inner} {name}")
    start = fedfleet.Experiment(fedfleet.load(CONFIG, {"task.model": HERE + model})).z
    assert all(not torch.equal(found["serial"][f"x.{name}"], leaf) for name, leaf in start["x"].items())


def test_a_gru_reads_as_its_arguments_say(tmp_path):
    run = fedfleet.run(CONFIG, {"task.model": f"{HERE}Reader", "task.arguments": {"kind": "GRU"}}, out=tmp_path / "run")
    assert weights(run)["x.layer.weight_ih_l0"].shape == (18, 8)


def test_a_net_beside_the_configuration_is_found_recorded_and_gone_on_with(folder, monkeypatch, tmp_path):
    kept = set(sys.modules)
    run = fedfleet.run(folder / "run.yaml", {"task.arguments": {"width": 5}}, out=tmp_path / "run")
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert written["code_dir"] == str(folder)
    assert (len(written["task"]["source"]), written["task"]["arguments"]) == (64, {"width": 5})
    assert weights(run)["x.1.weight"].shape == (5, 64)
    forget(kept)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(folder)])
    monkeypatch.chdir(tmp_path)
    longer = fedfleet.resume(run.folder, {"rounds": 3})
    whole = fedfleet.run(folder / "run.yaml", {"task.arguments": {"width": 5}, "rounds": 3}, out=tmp_path / "whole")
    assert (longer.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert longer.summary["bit_exact"]
    forget(kept)
    (helper,) = folder.glob("blocks_*.py")  # the maker's own file stays as it is
    helper.write_text(BLOCKS.format("Sigmoid"))  # of another length, or Python may take it for what it has compiled
    tells(
        lambda: fedfleet.resume(run.folder, {"rounds": 4}),
        "^task.source=' … : the code of net_ … :make is other by now",
    )
    tells(lambda: fedfleet.Run(run.folder, run.summary).model(), "is other by now")
    other = fedfleet.run(folder / "run.yaml", {"task.arguments": {"width": 5}, "rounds": 3}, out=tmp_path / "other")
    lines = grouped([read(r.folder) for r in (longer, whole, other)])
    assert sorted(map(len, lines.values())) == [1, 2]
    assert all("task.source" in name for name in lines)


@pytest.mark.slow
def test_runs_of_two_nets_are_compared_in_this_process_and_in_others(folder, tmp_path):
    (module,) = (p.stem for p in folder.glob("net_*.py"))
    text = "from torch import nn\n\ndef linear():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"
    (folder / f"{module}_too.py").write_text(text)
    entries = {
        "narrow": {"task.arguments.width": 3},
        "linear": {"task.model": f"{module}_too:linear", "task.arguments": None},
    }
    config = fedfleet.load(folder / "run.yaml", {"compare": entries, "rounds": 1})
    assert config.code_dir == str(folder)
    runs = campaign.run(config, tmp_path / "both", Progress.silent())
    assert [len(weights(r)) for r in runs] == [4, 2]
    apart = campaign.run(config, tmp_path / "apart", Progress.silent(), jobs=2)
    for one, two in zip(runs, apart, strict=True):
        assert (one.folder / "model.safetensors").read_bytes() == (two.folder / "model.safetensors").read_bytes()
    varied = fedfleet.load(
        folder / "run.yaml", {"vary": {"task.arguments.width": [2, 4]}, "task.model": f"{module}:make"}
    )
    assert [fedfleet.Experiment(t.config).task.init(0)["x"]["1.bias"].numel() for t in sweep.planned(varied)] == [2, 4]


@pytest.mark.ray
def test_workers_are_sent_code_that_their_python_does_not_find(folder, tmp_path):
    local = fedfleet.run(folder / "run.yaml", out=tmp_path / "local")
    given = {"executor.kind": "ray", "executor.actors": 2, "executor.cpus_per_actor": 0.5}
    ray = fedfleet.run(folder / "run.yaml", given, out=tmp_path / "ray")
    assert (local.folder / "model.safetensors").read_bytes() == (ray.folder / "model.safetensors").read_bytes()


def test_the_folder_one_runs_in_and_code_dir(folder, tmp_path, monkeypatch):
    (module,) = (p.stem for p in folder.glob("net_*.py"))
    config = {**CONFIG, "task": {"model": f"{module}:make"}}
    with pytest.raises(fedfleet.ConfigError, match=f"there is no module '{module}'.*{tmp_path / 'elsewhere'}"):
        fedfleet.Experiment(fedfleet.load(config))
    tells(lambda: fedfleet.Experiment(fedfleet.load(config, {"code_dir": "nowhere"})), "code_dir='nowhere'")
    assert fedfleet.Experiment(fedfleet.load(config, {"code_dir": str(folder)})).config.code_dir == str(folder)
    forget(set(sys.modules) - {module})
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(tmp_path))])
    monkeypatch.chdir(folder)
    assert fedfleet.Experiment(fedfleet.load(config)).config.code_dir == str(folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module}.py").write_text("make = 3")
    with pytest.raises(fedfleet.ConfigError, match=rf"was loaded from {folder}, and there is another in {other}"):
        fedfleet.Experiment(fedfleet.load(config, {"code_dir": str(other)}))


def test_what_will_not_do_is_refused_in_one_line_before_the_run(subtests, tmp_path):
    rows = [
        ({"model": "tests.tasks.own_net:mlp"}, "there is no module 'tests.tasks.own_net': did you mean 'own_nets'?"),
        ({"model": f"{HERE}mlpp"}, "tests.tasks.own_nets has no 'mlpp': did you mean 'mlp'?"),
        ({"model": f"{HERE}SLOPE"}, "it is a float, and is to be called"),
        ({"model": f"{HERE}no_net"}, "no_net returned a dict: return a torch.nn.Module"),
        ({"model": f"{HERE}broken"}, "broken raised KeyError ('width')"),
        ({"model": f"{HERE}leaving"}, "leaving raised EndsProgram (it raised SystemExit(0), which would end the program)"),
        ({"model": "tests.tasks.own_end:net"}, "cannot be imported (EndsProgram: it raised SystemExit(0)"),
        ({"model": f"{HERE}unlearnt"}, "it has no parameters to learn"),
        ({"model": f"{HERE}lazy"}, "'1.weight' has no shape yet"),
        ({"model": f"{HERE}needs"}, "needs needs 'depth': give task.arguments.depth"),
        ({"model": f"{HERE}mlp", "arguments": {"widht": 3}},
         "task.arguments.widht=3: mlp takes no such argument: did you mean 'width'?"),
        ({"model": f"{HERE}By", "arguments": {"classes": 4}}, "outputs of shape (3, 4), and there are 10 classes"),
        ({"model": f"{HERE}plain"}, "it fails on 3 examples of (1, 8, 8) float32 (RuntimeError"),
        ({"model": f"{HERE}Branching"}, "it runs for one client and not for many at once"),
        ({"model": f"{HERE}Item"}, "or set executor.inner=serial"),
        ({"model": f"{HERE}Halved"}, "it computes in bfloat16 … make its layers float32"),
        ({"model": f"{HERE}InPlace"}, "it writes in place into the examples that it is given"),
        ({"model": f"{HERE}Drawing"}, "in training it draws from torch's generator, which no run could repeat"),
        ({"model": f"{HERE}Attention", "arguments": {"dropout": 0.1}},
         "its attention 'layer.self_attn' has dropout=0.1"),
        ({"model": f"{HERE}Counting"}, "wrote into"),
        ({"model": f"{HERE}Listed"}, "for those in a plain list are not found"),
        ({"model": f"{HERE}Pair"}, "its forward returned a tuple: return a tensor"),
        ({"model": f"{HERE}Mean"}, "it has outputs of shape (10,) for 3 examples"),
        ({"model": f"{HERE}Replacing"}, "in training it gives x.layer.weight other data"),
        ({"model": f"{HERE}ByTheCount"}, "where a row more fills the batch up, x.layer.weight has another gradient"),
        ({"model": f"{HERE}OverTheBatch"},
         "lets rows of weight 0, which only fill a batch up, change what comes of the others"),
        ({"model": f"{HERE}at_random"}, "two nets of one seed begin with other weights"),
        ({"model": f"{HERE}mlp", "hidden": [3]}, "task: hidden=(3,) is not for model=tests.tasks.own_nets:mlp"),
        ({"model": f"{HERE}mlp", "weights": "random"}, "task: weights=random is not for model="),
        ({"model": "mlp", "arguments": {"width": 3}}, "task: arguments is for a net of your own"),
        ({"name": "module", "model": "mlp"}, "task: model='mlp' is no module:name"),
        ({"name": "module", "model": f"{HERE}mlp", "loss": "mes"}, "task.loss='mes': unknown; did you mean 'mse'?"),
        ({"name": "module", "model": f"{HERE}mlp", "loss": f"{HERE}overall"},
         "loss=overall gives one number for 3 examples, which is not the mean"),
        ({"name": "module", "model": f"{HERE}mlp", "metrics": ["mae"]},
         "task.metrics='mae': none that goes with loss=cross_entropy"),
        ({"name": "module", "model": f"{HERE}mlp", "metrics": [f"{HERE}wrst"]},
         "task.metrics.0='tests.tasks.own_nets:wrst':"),
        ({"name": "module", "model": f"{HERE}By", "arguments": {"classes": 4}},
         "there is a label 9, and the net has 4 outputs"),
        ({"name": "module"}, "task.model: missing"),
    ]  # fmt: skip
    all_say(subtests, lambda given: fedfleet.run({**CONFIG, "task": given}, out=tmp_path / "run"), rows)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["Branching", "Item", "Halved"])
def test_what_vmap_cannot_run_runs_one_client_at_a_time(model, tmp_path):
    given = {"task.model": HERE + model, "executor.inner": "serial"}
    assert fedfleet.run(CONFIG, given, out=tmp_path / "run").summary["status"] == "finished"


def test_a_module_that_cannot_be_imported_says_why(folder):
    (path,) = folder.glob("blocks_*.py")
    for text, says in (("import nothing_there", "imports 'nothing_there', which is not there"), ("1 +", "SyntaxError")):
        path.write_text(text)
        tells(lambda: fedfleet.Experiment(fedfleet.load(folder / "run.yaml")), says)


def test_a_plan_says_what_a_net_of_torchvision_is_told():
    x, y = torch.rand(12, 3, 32, 32), torch.arange(12) % 3
    task = {"name": "classification", "model": "torchvision:shufflenet_v2_x0_5", "norm": "group"}
    config = {"task": task, "executor": {"kind": "local", "inner": "serial"}, "cohort": {"size": 2}}
    config |= {"algorithm": {"batch_size": 2}}
    made = fedfleet.Experiment(fedfleet.load(config), data=fedfleet.data.from_arrays(x, y, client=y))
    assert dict(describe(made))["told to the net"] == "num_classes 3, as the data have"
    assert "told to the net" not in dict(describe(fedfleet.Experiment(fedfleet.load(CONFIG))))


NETS = ["logistic", "cnn_bn", *(HERE + n for n in ("Normed", "Reader", "Tied", "Twice"))]


@pytest.mark.parametrize("model", slow_but(NETS, "cnn_bn", HERE + "Tied", HERE + "Twice"))
def test_a_run_gives_its_net_back(model, tmp_path):
    run = fedfleet.run(CONFIG, {"task.model": model}, out=tmp_path / "run")
    x = fedfleet.Experiment(fedfleet.load(CONFIG, {"task.model": model}))
    test = x.evaluation["test"]
    for found in (run, fedfleet.Run(run.folder, run.summary)):
        net = found.model()
        assert isinstance(net, nn.Module)
        assert not net.training
        with torch.no_grad():
            accuracy = (net(decode(test["x"])).argmax(1) == test["y"]).double().mean()
        assert float(accuracy) == pytest.approx(run.summary["final"]["eval/accuracy"], abs=0.01)
    assert not any(
        isinstance(layer, nn.Module) and "fedfleet.tasks.stateful" in type(layer).__module__ for layer in net.modules()
    )
    assert run.model("best").state_dict().keys() == net.state_dict().keys()
    again = run.model()
    names = {name.partition(".")[2]: leaf for name, leaf in weights(run).items()}
    _, strange = again.load_state_dict(names, strict=False)
    assert not strange
    for path in (tmp_path / "net.pt", tmp_path / "net.safetensors"):
        assert run.save_state_dict(str(path)) == path
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        again = x.task.net()  # as a user's own code makes it
        again.load_state_dict(found)
        assert all(torch.equal(leaf, net.state_dict()[name]) for name, leaf in again.state_dict().items())
    for warm in (tmp_path / "net.pt", run.folder / "model.safetensors"):
        begun = fedfleet.Experiment(fedfleet.load(CONFIG, {"task.model": model, "warm_start": str(warm)}))
        assert all(torch.equal(leaf, names[name]) for name, leaf in begun.z["x"].items())
        assert all(torch.equal(leaf, names[name]) for name, leaf in begun.z.get("b", {}).items())


def test_a_state_dict_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    run = fedfleet.run(CONFIG, {"task.model": "logistic", "rounds": 1}, out=tmp_path / "run")
    best = torch.load(run.save_state_dict(tmp_path / "best.pt", "best"), weights_only=True)
    assert all(torch.equal(leaf, run.model("best").state_dict()[name]) for name, leaf in best.items())
    tells(lambda: run.save_state_dict(tmp_path / "net.bin"), "net.bin")
    for name in ("net.pt", "net.safetensors"):
        path = tmp_path / "none" / name
        refused(lambda path=path: run.save_state_dict(path), f"{path}: cannot be written", fedfleet.FedfleetError)


def test_a_net_that_was_made_in_python_comes_back_with_its_run(tmp_path):
    task = from_module(lambda: own_nets.Reader("GRU"))
    run = fedfleet.run({k: v for k, v in CONFIG.items() if k != "task"}, task=task, out=tmp_path / "run")
    assert isinstance(run.model(), own_nets.Reader)
    assert isinstance(run.model().layer, nn.GRU)
    assert isinstance(fedfleet.resume(run.folder, task=task).model(), own_nets.Reader)
    tells(lambda: fedfleet.Run(run.folder, run.summary).model(), "its task was made in Python")
    tells(lambda: run.model("first"), "model='first': give last or best")
    minimax = fedfleet.run(CONFIG, {"task": "auc", "algorithm.name": "local_sgda", "rounds": 1}, out=tmp_path / "auc")
    tells(lambda: minimax.model(), "its task is of no single net")


def test_weights_from_elsewhere_that_do_not_fit(subtests, tmp_path):
    def begin(content: Any, name: str = "w.pt") -> None:
        torch.save(content, tmp_path / name)
        given = {"task.model": f"{HERE}Normed", "warm_start": str(tmp_path / name)}
        fedfleet.Experiment(fedfleet.load(CONFIG, given))

    torch.manual_seed(0)
    net = own_nets.Normed(10)
    state = net.state_dict()
    made = fedfleet.Experiment(fedfleet.load(CONFIG, {"task.model": f"{HERE}Normed"})).task.net()
    begin({"state_dict": made.state_dict()})
    rows = [
        (state | {"fixed.weight": state["fixed.weight"] + 1}, "'fixed.weight' is not learnt"),
        ({k: v for k, v in state.items() if k != "head.bias"}, "does not fit this task's model at 'x.head.bias'"),
        (state | {"more": torch.zeros(2)}, "does not fit this task's model at 'more'"),
        ([1, 2], "it holds no state_dict"), (net, "no file of weights alone"),
    ]  # fmt: skip
    all_say(subtests, begin, rows)
    (tmp_path / "w.safetensors").write_text("no")
    lost = fedfleet.load(CONFIG, {"warm_start": str(tmp_path / "w.safetensors")})
    tells(lambda: fedfleet.Experiment(lost), "not a readable safetensors file")


def test_the_command_line_takes_a_path(folder, command, tmp_path):
    (module,) = (p.stem for p in folder.glob("net_*.py"))
    status, said, error = command("plan", folder / "run.yaml", "task.arguments.width=4")
    assert status == 0, error
    assert "2 of 2 weight matrices" in " ".join(said.split())
    status, _, error = command("run", folder / "run.yaml", f"task.model={module}:mke", "--out", tmp_path / "run")
    assert (status, error.count("\n")) == (2, 1)
    assert "did you mean 'make'?" in error


@pytest.mark.parametrize("algorithm", ["scaffold", "fedrod", "fedopt", "ditto"])
def test_other_algorithms_take_such_nets(algorithm, tmp_path):
    given = {"task.model": f"{HERE}mlp", "algorithm": algorithm, "rounds": 1}
    assert fedfleet.run(CONFIG, given, out=tmp_path / "run").summary["status"] == "finished"


def test_a_head_is_the_layer_that_is_applied_last():
    def head(model: str) -> frozenset[str]:
        return fedfleet.Experiment(fedfleet.load(CONFIG, {"task.model": HERE + model})).task.leaves["head"]

    assert (head("mlp"), head("Normed")) == ({"3.weight", "3.bias"}, {"head.weight", "head.bias"})
    assert head("Tied") == frozenset()  # whose last layer by name is not the last
    assert Path(named.home(own_nets.mlp) or "") == Path(__file__).parents[3]


def test_a_whole_task_and_a_whole_algorithm_are_named_as_nets_are(tmp_path):
    parts = {"task": {"name": f"{HERE}regression", "arguments": {"width": 10}}}
    parts["algorithm"] = {"name": f"{HERE}damped", "arguments": {"damping": 0.25}}
    config = {**CONFIG, **parts}
    run = fedfleet.run(config, out=tmp_path / "run")
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert written["algorithm"]["arguments"] == {"damping": 0.25}
    assert all(len(written[part]["source"]) == 64 for part in parts)
    assert run.summary["own"] == {}
    task = own_nets.regression((1, 8, 8), 10)
    algorithm = own_nets.damped(task, CohortOptions(size=4), damping=0.25)
    own = {k: v for k, v in CONFIG.items() if k not in parts}
    same = fedfleet.run(own, task=task, algorithm=algorithm, out=tmp_path / "same")
    assert (run.folder / "model.safetensors").read_bytes() == (same.folder / "model.safetensors").read_bytes()
    longer = fedfleet.resume(run.folder, {"rounds": 3})
    assert longer.summary["rounds"] == 3
    assert isinstance(longer.model(), nn.Sequential)
    tells(lambda: fedfleet.Experiment(fedfleet.load(config, {"algorithm.source": "0"})), "algorithm.source='0'")


def test_parts_by_path_that_will_not_do(subtests):
    def call(overrides):
        base = {k: v for k, v in CONFIG.items() if k not in overrides}
        fedfleet.Experiment(fedfleet.load({**base, **overrides}))

    rows = [
        ({"algorithm": f"{HERE}dampd"},
         "algorithm.name='tests.tasks.own_nets:dampd': tests.tasks.own_nets has no 'dampd'"),
        ({"algorithm": {"name": f"{HERE}damped", "lr": 0.1}}, "algorithm.lr=0.1: damped takes it among its arguments"),
        ({"algorithm": {"name": f"{HERE}damped", "arguments": {"rl": 1}}},
         "algorithm.arguments.rl=1: damped takes no such argument"),
        ({"algorithm": {"name": f"{HERE}blind"}},
         "algorithm.name='tests.tasks.own_nets:blind': what it returns will not do: algorithm="),
        ({"algorithm": {"name": f"{HERE}plain"}}, "plain': what it returns will not do: algorithm=a Linear"),
        ({"task": {"name": f"{HERE}plain"}}, "plain': what it returns will not do: task=a Linear"),
        ({"task": {"name": f"{HERE}broken"}}, "broken': it raised KeyError ('width')"),
        ({"task": {"name": f"{HERE}regression", "arguments": {"width": 4}}},
         "there is a label 9, and the net has 4 outputs"),
        ({"domains": f"{HERE}plain"}, "domains.kind='tests.tasks.own_nets:plain': unknown"),
    ]  # fmt: skip
    all_say(subtests, call, rows)
