"""Torchvision's nets as extractors and generators: sizes, weights from files, running statistics, what fine-tuning scales."""

import copy

import pytest
import torch
from torch import nn

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.population import problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.author import BUFFERS
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Batch
from fedfleet.tasks import pretrained, two_heads_nets
from fedfleet.tasks.adaptation import AdaptationOptions, DomainAdaptation
from fedfleet.tasks.adaptation_nets import build
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.maker import of_path
from fedfleet.tasks.module import ModuleOptions, from_module, of_options
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.two_heads import TwoHeads, TwoHeadsOptions
from tests.refusals import all_say, tells
from tests.tasks.own_nets import Normalised

PHOTOGRAPH = DataShape((3, 32, 32), 31)


def size(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def adaptation(**options) -> DomainAdaptation:
    return DomainAdaptation(AdaptationOptions(model="mobilenet_v2", weights="random", **options), PHOTOGRAPH)


@pytest.mark.parametrize(
    ("loss", "adversary"),
    [("features", 1024 * 1024 + 1024 + 2050), ("products", 31 * 1024 * 1024 + 1024 + 2050), ("margin", 1_081_375)],
)
def test_the_released_nets_for_photographs(loss, adversary):
    nets = build("mobilenet_v2", (3, 224, 224), 31, (), loss, 0.5, 0)
    assert (size(nets.features), size(nets.bottleneck)) == (2_223_872, 1280 * 1024 + 1024 + 2 * 1024)
    assert size(nets.head) == 1024 * 1024 + 1024 + 1024 * 31 + 31 == 1_081_375
    assert size(nets.adversary) == adversary
    assert [type(layer).__name__ for layer in nets.head.children()] == ["Linear", "ReLU", "Dropout", "Linear"]


@pytest.mark.parametrize(("classes", "head"), [(31, 517_093), (10, 506_530)])
def test_facts_nets_for_photographs(classes, head):
    nets = two_heads_nets.build("resnet101", (3, 300, 300), classes, (), 0)
    assert (size(nets.generator), size(nets.head)) == (44_549_160, head)


@pytest.mark.parametrize(("name", "width"), [("resnet18", 512), ("resnet50", 2048), ("mobilenet_v2", 1280)])
def test_features_are_pooled_over_the_image(name, width):
    net, found = pretrained.features(name, "random")
    assert (found, net.eval()(torch.zeros(2, 3, 64, 64)).shape) == (width, (2, width))


def test_images_are_normalised_as_imagenets():
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    bytes_ = torch.tensor([0.0, 128.0, 255.0]).view(1, 1, 3).expand(3, 1, 3)[None]
    expected = (bytes_ / 255 - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    torch.testing.assert_close(pretrained.AsImageNet()(bytes_ / 127.5 - 1), expected)


def test_weights_come_from_torchs_cache_or_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    mobile, resnet = AdaptationOptions(model="mobilenet_v2"), TwoHeadsOptions(model="resnet18")
    tells(
        lambda: DomainAdaptation(mobile, PHOTOGRAPH), "mobilenet_v2- … .pth is not there: download https://", ValueError
    )
    tells(
        lambda: TwoHeads(resnet, PHOTOGRAPH), "'two_heads': weights='imagenet': … resnet18- … is not there", ValueError
    )
    torch.manual_seed(0)
    whole = pretrained.pretrained("mobilenet_v2", "random")
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / "mobilenet_v2-b0353104.pth"
    torch.save(whole.state_dict(), path)
    with pytest.raises(ValueError, match=r"mobilenet_v2-b0353104\.pth is not what its name says: download"):
        DomainAdaptation(AdaptationOptions(model="mobilenet_v2"), PHOTOGRAPH)
    monkeypatch.setattr(pretrained, "_digest", lambda path: "b0353104" + 56 * "0")
    z = DomainAdaptation(AdaptationOptions(model="mobilenet_v2"), PHOTOGRAPH).init(5)
    expected = dict(whole.named_parameters())["features.0.0.weight"]
    assert torch.equal(z["x"]["features.1.0.0.0.weight"], expected)


def test_fine_tuning_scales_the_gradient_of_what_was_trained_before_alone():
    batch = Batch(
        {"x": rng.normal(rng.key(1), (4, 3, 32, 32)), "y": torch.tensor([0, 1, -1, -1]), "target": torch.arange(4) > 1},
        torch.ones(4),
    )

    def gradient(**options):
        made = adaptation(dropout=0.0, **options)
        z = made.init(0)
        leaves = T.map(lambda t: t.clone().requires_grad_(t.is_floating_point()), z)
        made.objectives["train"].loss(leaves, batch, None, rng.key(0))[0].backward()
        return {name: leaf.grad for name, leaf in T.named_leaves(leaves["x"])}

    whole, small = gradient(nu=0.3), gradient(nu=0.3, fine_tune=True, feature_gradient=0.125)
    for name, full in whole.items():
        share = 0.125 if name.startswith("features.") else 1.0
        torch.testing.assert_close(small[name], share * full, rtol=1e-4, atol=1e-7)
    assert whole["features.1.0.0.0.weight"].abs().max() > 1e-4


def photographs() -> InMemoryPopulation:
    """A client with labels and one without, of nine rows and seven."""
    x, y = rng.normal(rng.key(2), (16, 3, 32, 32), torch.float64), torch.arange(16) % 31
    indices, offsets, domain = torch.arange(16), torch.tensor([0, 9, 16]), torch.tensor([0, 1])
    return InMemoryPopulation({"x": x, "y": y}, indices, offsets, domain).withholding(torch.arange(16) >= 9)


@pytest.mark.parametrize(("name", "own"), [("fedmm", {"mu1": 0.5, "mu2": 0.5}), ("gt_hsgd", {})])
@pytest.mark.slow
def test_statistics_travel_and_clients_side_by_side_compute_what_one_does(name, own):
    task, entry = adaptation(), ALGORITHMS[name]
    options = entry.options(steps=1, batch_size=4, lr=0.01, **own)
    people, models = photographs(), []
    for inner in ("serial", "batched"):
        algorithm = entry.build(options, task, CohortOptions(size=2))
        executor = LocalExecutor(1)
        executor.start(Setup.of(algorithm, task, people, inner))
        z = T.map(torch.Tensor.double, task.init(0))
        *_, last = simulate(algorithm, z, problem(people), Conditions(seed=0, block_size=2), executor, 1)
        models.append(algorithm.views["global"].params(last.state))
        executor.close()
    for (path, a), (_, b) in zip(*map(T.named_leaves, models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7, msg=path)
    moved = models[0][BUFFERS]["bottleneck.1.running_mean"] - z[BUFFERS]["bottleneck.1.running_mean"]
    assert moved.abs().max() > 1e-3
    assert any("features." in name for name in models[0][BUFFERS])


def test_what_a_net_is_not_for_is_refused(subtests):
    grey, low = DataShape((1, 32, 32), 31), DataShape((3, 31, 32), 31)
    resnet = {"model": "resnet18", "weights": "random"}
    rows = [
        (lambda: DomainAdaptation(AdaptationOptions(model="mobilenet_v2", weights="random"), grey),
         "'domain_adaptation'"),
        (lambda: DomainAdaptation(AdaptationOptions(**resnet), low), "task.name='domain_adaptation': "),
        (lambda: TwoHeads(TwoHeadsOptions(**resnet), low), "task.name='two_heads': "),
        (lambda: Classification(ClassificationOptions(**resnet), grey),
         "'resnet18' needs images in colour of at least 32x32"),
    ]  # fmt: skip
    all_say(subtests, lambda make: make(), [(make, f"{says} … at least 32x32") for make, says in rows], ValueError)
    rows = [
        (lambda: AdaptationOptions(weights="random"), "weights=random is not for model=mlp"),
        (lambda: TwoHeadsOptions(weights="random"), "weights=random is not for model=mlp"),
        (lambda: ClassificationOptions(model="cnn", weights="random"), "weights=random is not for model=cnn"),
        (lambda: ClassificationOptions(**resnet, init="zero"), "init=zero is not for model=resnet18"),
        (lambda: ClassificationOptions(model="mlp", norm="group"), "norm=group is not for model=mlp"),
        (lambda: ClassificationOptions(**resnet, norm="frozen"),
         "norm=frozen keeps statistics that weights=random has none"),
    ]  # fmt: skip
    for make, says in rows:
        with subtests.test(says), pytest.raises(ValueError, match=says):
            make()


@pytest.mark.parametrize(
    ("model", "floats"), [("resnet18", 11_176_512 + 513 * 7), ("mobilenet_v2", 2_223_872 + 1281 * 7)]
)
def test_classifiers_have_a_last_layer_of_their_own(model, floats):
    task = Classification(ClassificationOptions(model=model, weights="random"), DataShape((3, 32, 32), 7))
    assert task.parts == ("x", BUFFERS)
    z = task.init(3)
    assert T.count(z["x"]) == floats  # of resnet18 as FedOMG's experiments have it
    last = "1.fc" if model == "resnet18" else "1.classifier.1"
    assert task.leaves["head"] == {f"{last}.weight", f"{last}.bias"}
    assert torch.equal(task.init(3)["x"][f"{last}.weight"], z["x"][f"{last}.weight"])
    assert not torch.equal(task.init(4)["x"][f"{last}.weight"], z["x"][f"{last}.weight"])
    assert task.logits(z, torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_a_classifier_begins_with_what_it_has_from_imagenet(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    options = ClassificationOptions(model="resnet18")
    with pytest.raises(ValueError, match=r"weights='imagenet': \S+resnet18-\w+\.pth is not there: download https://"):
        Classification(options, PHOTOGRAPH)
    whole = pretrained.pretrained("resnet18", "random")
    (tmp_path / "checkpoints").mkdir()
    torch.save(whole.state_dict(), tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    monkeypatch.setattr(pretrained, "_digest", lambda path: "f37072fd" + 56 * "0")
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    task = Classification(options, PHOTOGRAPH)
    z = task.init(0)
    whole.fc = nn.Linear(512, 31)
    with torch.no_grad():
        whole.fc.weight.copy_(z["x"]["1.fc.weight"])
        whole.fc.bias.copy_(z["x"]["1.fc.bias"])
        expected = whole.eval()(pretrained.AsImageNet()(x))
    torch.testing.assert_close(task.logits(z, x), expected, rtol=1e-4, atol=1e-4)


def test_other_layers_that_normalise():
    """GroupNorm has nothing to count; fixed statistics are used in training as outside, and do not travel."""
    x, y = torch.randn(3, 3, 32, 32), torch.tensor([0, 1, 2])
    batch, key = Batch({"x": x, "y": y}, torch.ones(3)), rng.key(0)
    made = Classification(
        ClassificationOptions(model="resnet18", weights="random", norm="group"), DataShape(PHOTOGRAPH.example, 7)
    )
    z = made.init(0)
    assert (set(z), T.count(z), len(made.leaves["norm"])) == ({"x"}, 11_176_512 + 513 * 7, 40)
    alone = made.objectives["train"].loss(z, Batch({"x": x[:1], "y": y[:1]}, torch.ones(1)), None, key)[0]
    together = made.functions["per_example"](z, batch)["loss"][0]
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)

    norm = torch.nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    torch.nn.init.normal_(norm.weight)
    maps = torch.randn(5, 4, 6, 6)
    expected = norm.eval()(maps)
    net = pretrained.with_norm(torch.nn.Sequential(norm), "frozen")
    torch.testing.assert_close(net.train()(maps), expected)
    assert ([*net.buffers()], [name for name, _ in net.named_parameters()]) == ([], ["0.weight", "0.bias"])


@pytest.mark.parametrize(
    "layer", [torch.nn.BatchNorm1d(4), torch.nn.BatchNorm3d(4), torch.nn.BatchNorm2d(4, affine=False)]
)
def test_each_kind_of_batch_norm_is_replaced(layer):
    dims = {torch.nn.BatchNorm1d: (), torch.nn.BatchNorm2d: (3, 3), torch.nn.BatchNorm3d: (2, 2, 2)}[type(layer)]
    x = torch.randn(5, 4, *dims)
    layer.running_mean, layer.running_var = torch.randn(4), torch.rand(4) + 0.5
    expected = layer.eval()(x)
    frozen = pretrained.with_norm(torch.nn.Sequential(copy.deepcopy(layer)), "frozen").train()
    torch.testing.assert_close(frozen(x), expected)
    grouped = pretrained.with_norm(torch.nn.Sequential(layer), "group")
    groups = 4 if x.dim() > 2 else 1
    torch.testing.assert_close(grouped(x), torch.nn.functional.group_norm(x, groups))
    assert float(grouped(x).abs().max()) > 0.1


def test_a_net_of_ones_own_normalises_as_is_said():
    shape = DataShape((8,), 3)
    own = {"model": "tests.tasks.own_nets:Normalised", "norm": "group"}
    made = Classification(ClassificationOptions(**own), shape)
    assert set(made.init(0)) == {"x"}
    kinds = {type(layer) for layer in made.net().modules()}
    assert torch.nn.GroupNorm in kinds
    assert torch.nn.BatchNorm1d not in kinds
    assert set(Classification(ClassificationOptions(**{**own, "norm": "frozen"}), shape).init(0)) == {"x"}
    assert set(Classification(ClassificationOptions(model=own["model"]), shape).init(0)) == {"x", "b"}
    with pytest.raises(ConfigError, match=r"norm=frozen.*has none to keep: choose norm=group"):
        Classification(ClassificationOptions(**own | {"norm": "frozen", "arguments": {"counts": False}}), shape)
    with pytest.raises(
        ConfigError, match=r"norm=group is not for task.model='tests.tasks.own_nets:mlp', which has no BatchNorm"
    ):
        Classification(ClassificationOptions(model="tests.tasks.own_nets:mlp", norm="group"), shape)


@pytest.mark.parametrize("of_labels", [True, False])
def test_any_net_of_torchvision_has_as_many_outputs_as_there_are_classes(of_labels):
    def made(model, **options):
        if of_labels:
            return Classification(ClassificationOptions(model=model, **options), PHOTOGRAPH)
        return of_options(ModuleOptions(model=model, **options), PHOTOGRAPH)

    for model in ("torchvision:shufflenet_v2_x0_5", "torchvision.models:shufflenet_v2_x0_5"):
        task = made(model, norm="group")
        assert task.make.filled == {"num_classes": 31}
        assert task.make.said == "task.model='torchvision.models:shufflenet_v2_x0_5'"
        z = task.init(0)
        assert set(z) == {"x"}  # no BatchNorm counts
        assert z["x"]["fc.weight"].shape == (31, 1024)
    task = made("torchvision:shufflenet_v2_x0_5", arguments={"num_classes": 3})
    assert (task.make.filled, set(task.init(0)), task.init(0)["x"]["fc.weight"].shape) == ({}, {"x", "b"}, (3, 1024))
    tells(lambda: made("torchvision:resnet19"), "torchvision.models has no 'resnet19': did you mean 'resnet1")
    given = {"weights": "IMAGENET1K_V1"}  # outputs come with them
    assert of_path("torchvision.models:shufflenet_v2_x0_5", given, PHOTOGRAPH).filled == {}
    assert of_path("torchvision.models:shufflenet_v2_x0_5", None, DataShape((3, 32, 32), 0)).filled == {}
    assert of_path("tests.tasks.own_nets:mlp", None, PHOTOGRAPH).filled == {}


def test_what_a_net_normalises_by_is_said_of_any_task_of_a_net():
    def kinds(task):
        return {type(layer) for layer in task.net().modules()}

    own = {"model": "tests.tasks.own_nets:Normalised", "arguments": {"classes": 3}}
    shape = DataShape((8,), 3)
    assert torch.nn.BatchNorm1d in kinds(of_options(ModuleOptions(**own), shape))
    for norm, layer in (("group", torch.nn.GroupNorm), ("frozen", pretrained.FixedNorm)):
        for task in (
            of_options(ModuleOptions(**own, norm=norm), shape),
            from_module(lambda: Normalised(classes=3), norm=norm),
        ):
            assert layer in kinds(task)
            assert torch.nn.BatchNorm1d not in kinds(task)
    with pytest.raises(ValueError, match=r"norm=group is not for model=transformers:x: leave it out"):
        ModuleOptions(model="transformers:x", norm="group")
    tells(lambda: from_module(torch.nn.Linear(8, 3), norm="layer"), "norm='layer': choose one of batch, group, frozen")
    with pytest.raises(ConfigError, match=r"norm=group is not for net Linear, which has no BatchNorm: leave it out"):
        from_module(torch.nn.Linear(8, 3), norm="group")
