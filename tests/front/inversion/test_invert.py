"""``fedfleet invert``: a client's examples, rebuilt from what it sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

import fedfleet
from fedfleet.commands import invert as inverting

ONE = {
    "rounds": 3, "population": {"clients": 1400}, "task": {"model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 1, "lr": 0.1, "weight": "uniform"},
    "cohort": {"size": 4}, "executor": {"kind": "local"},
}  # fmt: skip
FOUR = ["population.clients=350", "algorithm.batch_size=4"]
TEXTS = [
    "population={dataset: small_texts, clients: 2, partition: by_domain}",
    "task={name: language_model, model: null}",
    "cohort.size=2",
]
HIDDEN = "example_privacy={clip_norm: 3.0, delta: 1.0e-4, noise_multiplier: 0.1}"


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clients with one example each, of a linear net: one that can be solved for."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump(ONE), encoding="utf-8")
    return path


def told(folder: Path) -> dict:
    return json.loads((folder / "inversion.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"), [("closed", []), ("dlg", []), ("cosine", ["--tv", "1e-7", "--iterations", 400])]
)
def test_one_example_of_a_linear_net_is_rebuilt(command, one, method, more):
    status, out, err = command("invert", one, "--method", method, *more, "--labels", "inferred")
    assert status == 0, err
    folder = Path("runs/one-inverted")
    seen, numbers = load_file(folder / "inversion.safetensors"), told(folder)
    assert (seen["originals"] - seen["rebuilt"]).abs().max() < 1e-3
    assert seen["originals"].std() > 0.3
    assert (numbers["labels_right"], numbers["clients_in_what_is_seen"]) == (1, 1)
    assert numbers["seen"] == "what the client sent"
    mse = float((seen["originals"] - seen["rebuilt"]).square().mean()) / 4
    assert numbers["mean"]["mse"] == pytest.approx(mse, rel=1e-6)
    assert numbers["mean_of_blind_guess"]["psnr"] < 30 < numbers["mean"]["psnr"]
    assert f"PSNR {numbers['mean']['psnr']:.1f} dB" in out
    assert Image.open(folder / "inversion.png").size[0] > 100


def test_it_is_a_function_of_the_seed(command, one):
    how = (*FOUR, "task={model: mlp, hidden: [8]}", "--method", "dlg", "--iterations", 2, "--restarts", 2)
    for out, more in (("a", []), ("b", []), ("c", ["--restarts", 1])):
        assert command("invert", one, *how, *more, "--out", out)[0] == 0
    names = ("inversion.json", "inversion.safetensors", "inversion.png")
    assert all(Path("a", n).read_bytes() == Path("b", n).read_bytes() for n in names)
    assert told(Path("a"))["squared_distance"] <= told(Path("c"))["squared_distance"]
    assert len(told(Path("a"))["examples"]) == 4


def test_noise_on_gradients_hides_the_example(command, one):
    for out, more in (("plain", []), ("hidden", [HIDDEN])):
        assert command("invert", one, *more, "--method", "closed", "--out", out)[0] == 0
    plain, hidden = told(Path("plain"))["mean"]["mse"], told(Path("hidden"))["mean"]["mse"]
    assert plain < 1e-6 < 1e-3 < hidden
    assert "noised by the client (example_privacy)" in told(Path("hidden"))["seen"]


@pytest.mark.slow
def test_of_a_secure_sum_all_are_rebuilt_together(command, one):
    secure = "secure_aggregation={bits: 16, clip: 1.0}"
    assert command("invert", one, secure, "--method", "dlg", "--iterations", 30, "--out", "sum")[0] == 0
    assert command("invert", one, "--method", "dlg", "--iterations", 30, "--out", "alone")[0] == 0
    sum_, alone = told(Path("sum")), told(Path("alone"))
    assert sum_["clients_in_what_is_seen"] == len({e["client"] for e in sum_["examples"]}) == 4
    assert sum_["client"] == alone["client"]
    assert alone["mean"]["mse"] < sum_["mean"]["mse"]
    mine = [e["mse"] for e in sum_["examples"] if e["client"] == sum_["client"]]
    assert sum_["mean"]["mse"] == pytest.approx(sum(mine) / len(mine))


def test_a_run_is_attacked_from_its_checkpoint(command, one):
    turns = "selection=round_robin"  # which remembers whose turn it is
    run = fedfleet.run(one, {"rounds": 2, "checkpoint.every_s": None, "selection": "round_robin"}, out="run").folder
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    asked = ("--method", "closed")
    assert command("invert", run, *asked, "--out", "next")[0] == 0
    assert command("invert", run, *asked, "--round", 1, "--out", "first")[0] == 0
    for number, out in ((1, "first"), (2, "next")):
        assert command("invert", one, turns, *asked, "--round", number, "--out", f"of-{out}")[0] == 0
        a, b = load_file(f"{out}/inversion.safetensors"), load_file(f"of-{out}/inversion.safetensors")
        assert all(a[k].equal(b[k]) for k in ("seen", "originals", "rebuilt"))
        assert told(Path(out))["round"] == number
    assert not load_file("first/inversion.safetensors")["seen"].equal(load_file("next/inversion.safetensors")["seen"])
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert command("invert", run, "--round", 3)[2].startswith(
        "error: --round 3: the run has rounds 0 to 1, and 2 would be"
    )


def test_an_interruption_leaves_nothing(command, one, monkeypatch):
    def interrupted(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(inverting, "rebuilt", interrupted)
    status, _, err = command("invert", one, "--out", "gone")
    assert (status, err.splitlines()[-1]) == (130, "interrupted: nothing was written; the same command begins again")
    assert not Path("gone").exists()


SENT = "transforms.up=[{name: top_k, share: 0.5}]"
REFUSED = [
    (["--method", "magic"], "--method 'magic'"), (["--method", "closed", "--restarts", "2"], "--restarts 2"),
    (["--labels", "some"], "--labels 'some'"), (["--round", "3"], "--round 3: the run has rounds 0 to 2"),
    (["--method", "dlg", "--tv", "1"], "--tv 1"), (["--method", "closed", *FOUR], "--method closed"),
    (["--method", "closed", SENT], "--method closed"), (["--labels", "inferred", SENT], "--labels inferred"),
    (["--out", "."], ".: it exists"),
    (["vary={algorithm.lr: [1, 2]}"], "vary={'algorithm.lr': [1, 2]}: 2 different runs"),
]  # fmt: skip


def test_what_is_refused_is_said_in_a_line(subtests, command, one):
    for words, said in REFUSED:
        with subtests.test(str(words)):
            check_refused(command, one, words, said)


@pytest.mark.data("text/document.txt")
def test_texts_are_refused(command, one):
    check_refused(command, one, TEXTS, "task.name='language_model'")


def check_refused(command, folder: Path, words: list[str], said: str) -> None:
    status, _, err = command("invert", folder, *words)
    assert (status, err.splitlines()[-1][: 7 + len(said)]) == (2, f"error: {said}")
    assert not Path("runs").exists()
