"""GAN training: nets, objectives and scores against what can be worked out."""

import hashlib
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torchvision.models import inception_v3

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.resolve import parse_until
from fedfleet.datasets.digits import load
from fedfleet.datasets.examples import FederatedDataset
from fedfleet.report import write_report
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Batch
from fedfleet.tasks import gan_nets, scorer
from fedfleet.tasks.gan import Gan, GanOptions
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.scores import frechet_distance, inception_score
from tests.algorithms.harness import build, digits, flat, play
from tests.parts import slow_but
from tests.refusals import tells

SMALL = DataShape((1, 8, 8), 10)


def batch(n=12, padded=0):
    x = rng.uniform(rng.key(3), (n + padded, 1, 8, 8)) * 2 - 1
    return Batch({"x": x}, torch.cat([torch.ones(n), torch.zeros(padded)]))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_images_have_the_shape_of_the_data(shape):
    generator, discriminator = gan_nets.build(shape, 0.125, 0)
    noise, real = torch.rand(5, gan_nets.LATENT), torch.ones(5)
    images = generator(noise, real)
    assert images.shape == (5, *shape)
    assert images.abs().max() <= 1
    assert discriminator(images, real).shape == (5,)


def test_shapes_without_nets():
    tells(lambda: Gan(GanOptions(), DataShape((54,), 2)), "task.name='gan': images of shape (54,)", ValueError)


def test_normalisation_is_torchs_in_training_mode_and_padding_does_not_count():
    norm = gan_nets.Norm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(4))
        norm.bias.copy_(torch.rand(4))
    for x in (torch.randn(9, 4), torch.randn(9, 4, 3, 3)):
        want = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        torch.testing.assert_close(norm(x, torch.ones(9)), want)
        garbage = torch.cat([x, 100 * torch.ones_like(x[:3])])
        found = norm(garbage, torch.tensor([1.0] * 9 + [0.0] * 3))[:9]
        torch.testing.assert_close(found, want)


def test_each_player_has_its_own_objective():
    made, data, key = Gan(GanOptions(width=0.0625), SMALL), batch(), rng.key(5)
    z = T.map(lambda leaf: leaf.clone().requires_grad_(), made.init(0))
    value, _ = made.objectives["train"].loss(z, data, None, key)
    first, second = (2 * rng.uniform(rng.fold(key, k), (12, 100)) - 1 for k in (1, 2))
    ones = torch.ones(12)
    against = F.binary_cross_entropy_with_logits(made.judge(z, data.x, ones), ones)
    against = against + F.binary_cross_entropy_with_logits(
        made.judge(z, made.generate(z, first, ones), ones), torch.zeros(12)
    )
    fooled = F.binary_cross_entropy_with_logits(made.judge(z, made.generate(z, second, ones), ones), ones)
    assert value["x"].item() == pytest.approx(fooled.item(), abs=1e-6)
    assert value["y"].item() == pytest.approx(-against.item(), abs=1e-6)
    grads = torch.autograd.grad(value["y"], T.leaves(z["x"]), allow_unused=True, retain_graph=True)
    assert all(g is None for g in grads)  # G(z1) is cut off
    assert any(g.abs().max() > 0 for g in torch.autograd.grad(value["x"], T.leaves(z["x"])))


def test_padding_changes_no_loss():
    made, key = Gan(GanOptions(width=0.0625), SMALL), rng.key(5)
    z = made.init(0)
    losses = made.objectives["train"].loss
    plain, padded = (losses(z, data, None, key)[0] for data in (batch(), batch(padded=4)))
    torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-6)


def test_inception_score():
    assert inception_score(torch.full((1000, 10), 0.1)) == pytest.approx(1.0)
    certain = torch.eye(10).repeat(100, 1)
    assert inception_score(certain) == pytest.approx(10.0)
    # rows in the order of their class: each split of 100 has one class, overlapping ones have more
    ordered = torch.eye(10).repeat_interleave(100, 0)
    assert inception_score(ordered) == pytest.approx(1.0)
    growing = sum(_effective(k) for k in range(10)) / 10
    assert inception_score(ordered, legacy_splits=True) == pytest.approx(growing)


def _effective(k: int) -> float:
    """exp(entropy) of the classes among rows k to 100 (k + 1)."""
    counts = torch.eye(10).repeat_interleave(100, 0)[k : 100 * (k + 1)].sum(0)
    shares = counts / counts.sum()
    return math.exp(-float(torch.xlogy(shares, shares).sum()))


def test_frechet_distance():
    a = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)).double()
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-9)
    shift = torch.arange(6.0).double()
    assert frechet_distance(a, a + shift) == pytest.approx(float(shift.square().sum()), abs=1e-9)
    b = 3 * a  # roots commute: tr (C + 9 C - 2 * 3 C) = 4 tr C
    want = float((2 * a.mean(0)).square().sum() + 4 * a.T.cov().trace())
    assert frechet_distance(a, b) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("name", slow_but(["cdma_ada", "codasca", "extra_step", "local_sgda_plus"], "cdma_ada"))
def test_one_client_at_a_time_is_many_at_once(name):
    world = digits("gan", "quantity_skew", net={"width": 0.0625}, alpha=1.0, min_size=8)
    options = {"steps": 2, "batch_size": 7, "lr": 0.01}
    one, many = (
        flat(play(build(name, world.task, CohortOptions(size=5), **options), world, 2, inner=inner)[-1])
        for inner in ("serial", "batched")
    )
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


CONFIG = {
    "rounds": 2, "population": {"dataset": "digits", "clients": 10, "partition": {"kind": "label_sorted"}},
    "task": {"name": "gan", "width": 0.0625, "samples": 1000, "scorer": {"epochs": 3.0}},
    "algorithm": {"name": "cdma_one", "steps": 2, "batch_size": 30, "gradient_chunk": 30, "lr": 0.01},
    "cohort.size": 4, "executor": {"kind": "local", "block_size": 4}, "evaluation": {"every": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.slow
def test_a_run_is_scored_by_a_classifier_that_is_trained_once(tmp_path, monkeypatch):
    data = fedfleet.Experiment(fedfleet.load(CONFIG))
    run = data.run(tmp_path / "run")
    assert "a classifier trained here" in run.summary["scorer"]
    final = run.summary["final"]
    assert 1 <= final["eval/inception_score"] <= 10
    assert final["eval/fid"] > 0
    kept = load_file(run.folder / "samples.safetensors")["images"]
    assert (kept.shape, kept.dtype) == ((100, 1, 8, 8), torch.uint8)
    z = load_file(run.folder / "model.safetensors")
    model = {part: {k[2:]: v for k, v in z.items() if k.startswith(part)} for part in ("x", "y")}
    torch.testing.assert_close(kept.float() / 127.5 - 1, data.task.samples(model, 100), atol=1 / 127.5, rtol=0)
    page = write_report([run.folder], tmp_path / "report").read_text()
    assert "Generated images" in page
    assert (tmp_path / "report" / "figures" / "samples.png").stat().st_size > 1000
    for name in ("eval/generator_loss", "eval/discriminator_loss"):
        assert math.isfinite(final[name])

    def never(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(scorer, "_train", never)
    again = fedfleet.Experiment(fedfleet.load(CONFIG)).run(tmp_path / "again")
    assert again.summary["final"] == final
    longer = fedfleet.resume(again.folder, {"rounds": 3})
    assert longer.summary["scorer"] == run.summary["scorer"]

    (kept,) = (tmp_path.parent / "cache").rglob("small-3-*.safetensors")
    trained = load_file(kept)
    try:
        save_file({name: 2 * weights for name, weights in trained.items()}, kept)
        with pytest.raises(fedfleet.ConfigError) as e:
            fedfleet.resume(again.folder, {"rounds": 4})
    finally:
        save_file(trained, kept)
    found = re.fullmatch(
        r"\S+: its images were judged by (.*), and here would be by (.*): bring the run's .*", str(e.value)
    )
    assert found[1] == run.summary["scorer"] != found[2]
    assert json.loads((again.folder / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_the_classifier_has_learnt_something():
    digits = load(None)  # type: ignore[arg-type]
    told = []
    made = scorer.prepared(scorer.ScorerOptions(epochs=20), digits.train.x, digits.train.y, 10, told.append)
    probabilities, features = made(digits.test.x)
    assert float((probabilities.argmax(1) == digits.test.y).double().mean()) > 0.85
    assert features.shape == (len(digits.test), 64)
    assert any("training a classifier" in line for line in told)
    assert not any(p.requires_grad for p in made.parameters())


def test_inception_without_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    tells(lambda: fedfleet.Experiment(fedfleet.load(CONFIG, {"task.scorer.net": "inception"})), "is not there")


def test_clients_without_training_images():
    digits = load(None)  # type: ignore[arg-type]
    x, y = digits.train.x, digits.train.y
    sizes = torch.arange(0, 1001, 100)
    clients = InMemoryPopulation({"x": x, "y": y}, torch.arange(1000), sizes, torch.zeros(10, dtype=torch.int64))
    own = FederatedDataset("disk", clients, digits.test, digits.train.sample)
    with pytest.raises(fedfleet.ConfigError, match="needs the training images of a published data set"):
        fedfleet.Experiment(fedfleet.load({**CONFIG, "population": {}}), data=own)


def test_scores_where_there_are_none():
    assert math.isnan(frechet_distance(torch.ones(1, 3), torch.ones(5, 3)))
    assert math.isnan(frechet_distance(torch.full((5, 3), torch.inf), torch.ones(5, 3)))
    assert math.isnan(inception_score(torch.full((100, 10), torch.nan)))


def test_less_fid_is_better():
    assert less_is_better("eval/fid")
    assert less_is_better("fid")
    assert not less_is_better("eval/confidence")
    assert parse_until("eval/fid=40") == ("eval/fid", False, 40.0)


def test_domains_of_images_are_not_scored_apart(tmp_path):
    labels = {"population.dataset": {"name": "digits", "label_domains": True}, "population.partition": "by_domain"}
    x = fedfleet.Experiment(fedfleet.load(CONFIG, labels))
    run = x.run(tmp_path / "run")
    assert list(run.summary["final"]) == x.metric_names()
    assert not any("domain" in name for name in run.summary["final"])


def test_the_released_codes_range_is_taken_twice_for_the_fid_alone():
    made, other = (Gan(GanOptions(width=0.0625, samples=1000, legacy_range=range_), SMALL) for range_ in (False, True))
    z, data = made.init(0), batch(40)
    with torch.no_grad():
        plain, twice = (made_.functions["predict"](z, data) for made_ in (made, other))
        images = made.samples(z, 1000)
        want = frechet_distance(made.scorer(2 * images - 1)[1], made.scorer(2 * data.x - 1)[1])
    assert plain["inception_score"] == twice["inception_score"]
    assert float(twice["fid"]) == pytest.approx(want, rel=1e-6)
    assert float(plain["fid"]) != pytest.approx(want, rel=1e-2)


def test_a_damaged_classifier_is_trained_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, y = torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 10
    options = scorer.ScorerOptions(epochs=1.0)
    first = scorer.prepared(options, x, y, 10, lambda line: None)
    (kept,) = tmp_path.rglob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])
    second = scorer.prepared(options, x, y, 10, lambda line: None)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_one_local_step_is_parallel_sgda_with_noise_that_is_shared():
    """K = 1 through phase 2: every client returns z - lr u, whatever noise it draws."""
    world = digits("gan", net={"width": 0.0625})
    once = {"steps": 1, "batch_size": 10, "gradient_chunk": 10, "lr": 0.01, "random_steps": False}
    given = {"gradient_chunk": 10, "lr": 0.01}
    one, other = (
        flat(play(build(name, world.task, CohortOptions(size=5), **options), world, 2, inner="batched")[-1])
        for name, options in (("catalyst_scaffold_s", once), ("parallel_sgda", given))
    )
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64)])
def test_a_resnet_judges_images(shape):
    made = scorer.untrained(scorer.ScorerOptions(net="resnet18"), shape, 7).eval()
    probabilities, features = made(torch.zeros(2, *shape))
    assert (probabilities.shape, features.shape) == ((2, 7), (2, 512))
    assert sum(p.numel() for p in made.parameters()) == 11_176_512 - 3 * 64 * 49 + shape[0] * 64 * 49 + 64 + 512 * 7 + 7


@pytest.mark.slow
def test_inception_judges_images_by_the_weights_in_torchs_cache(tmp_path, monkeypatch):
    """Random weights in the place of torchvision's: images of any size, grey or not, give 2048 features."""
    path = tmp_path / "checkpoints" / scorer.INCEPTION
    path.parent.mkdir()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    net = inception_v3(weights=None, transform_input=False, init_weights=False)
    torch.save(net.state_dict(), path)
    with pytest.raises(ValueError, match="is not torchvision's file"):
        scorer.prepared(scorer.ScorerOptions(net="inception"), torch.empty(0), torch.empty(0), 10, lambda line: None)
    monkeypatch.setattr(scorer, "INCEPTION", f"inception-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth")
    path.rename(path.with_name(scorer.INCEPTION))
    options = scorer.ScorerOptions(net="inception")
    made = scorer.prepared(options, torch.empty(0), torch.empty(0), 10, lambda line: None)
    assert "Inception" in made.about
    for channels in (1, 3):
        probabilities, features = made(torch.rand(2, channels, 28, 28) * 2 - 1)
        assert (probabilities.shape, features.shape) == ((2, 1000), (2, 2048))
        torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
