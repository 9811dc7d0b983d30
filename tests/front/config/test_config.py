"""The configuration: layers, names, strictness, and that it never fails with anything but one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import strategies as st

import fedfleet
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config import resolve
from fedfleet.config.schema import SECTIONS, Config, at, load, with_overrides
from fedfleet.experiments.sweep import planned
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.errors import ConfigError
from tests.refusals import refused

pytestmark = pytest.mark.quick


def message(source: Any, overrides: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    assert str(caught.value).isprintable()
    return str(caught.value)


def given(section: Any) -> dict[str, Any]:
    """What was said in a section."""
    return section.model_dump(mode="json", exclude_unset=True)


def checked(source: Any, overrides: Any = None) -> Config | None:
    """The configuration, or None where it is refused in one line."""
    said = ""
    try:
        return load(source, overrides)
    except ConfigError as e:
        said = str(e)
    assert said.isprintable()
    return None


def test_an_empty_file_is_every_default_and_input_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n", encoding="utf-8")
    assert load(path) == load({})
    assert load(path).model_dump(mode="json") == Config().model_dump(mode="json")
    source = {"algorithm": {"name": "fedavg"}, "compare": {"a": {"rounds": 2}}}
    load(source, {"algorithm.lr": 0.5, "compare": {"b": {}}})
    assert source == {"algorithm": {"name": "fedavg"}, "compare": {"a": {"rounds": 2}}}


def test_what_is_written_by_its_name_alone_can_be_overridden_key_by_key() -> None:
    given = {"algorithm": {"name": "fedavg", "correction": "fedvarp"}}
    for change in ("algorithm.correction={kind: fedvarp, chances: true}", "algorithm.correction.chances=true"):
        assert load(given, [change]).algorithm.correction.chances
    falling = {"algorithm": {"name": "fedavg", "lr_schedule": {"kind": "power", "exponent": 0.5}}}
    assert load(falling, ["algorithm.lr_schedule=constant"]).algorithm.lr_schedule.exponent is None


def test_the_short_form_of_a_named_section() -> None:
    for short in ("population.partition=dirichlet", "population={partition: {kind: dirichlet}}"):
        config = load({}, [short, "population.partition.alpha=0.1"])
        assert given(config.population.partition) == {"kind": "dirichlet", "alpha": 0.1}
        assert config.population.partition.min_size == 1
    found = load({"algorithm": {"client_optimizer": "adam", "server_optimizer": "yogi"}}).model_dump(mode="json")[
        "algorithm"
    ]
    assert (found["client_optimizer"]["name"], found["server_optimizer"]["name"]) == ("adam", "yogi")


def test_a_cosine_lasts_as_long_as_the_run() -> None:
    config = load({"rounds": 40, "algorithm": {"lr_schedule": "cosine"}})
    rate = config.algorithm.lr_schedule
    assert [rate.at(t) for t in (0, 20, 39)] == pytest.approx([1, 0.5, 0.0015413], abs=1e-7)
    assert config.model_dump(mode="json")["algorithm"]["lr_schedule"]["rounds"] == 40
    longer = with_overrides(config, {"rounds": 130, "algorithm": {"name": "omg"}, "algorithm.of.lr_schedule": "cosine"})
    assert longer.model_dump(mode="json")["algorithm"]["of"]["lr_schedule"]["rounds"] == 130
    assert longer.algorithm.of.lr_schedule.at(65) == pytest.approx(0.5)
    assert load(config.model_dump(mode="json")).model_dump(mode="json") == config.model_dump(mode="json")
    flatter = load({"rounds": 40, "algorithm": {"lr_schedule": {"kind": "cosine", "rounds": 80}}})
    assert flatter.algorithm.lr_schedule.at(40) == pytest.approx(0.5)
    with pytest.raises(
        ConfigError, match=r"algorithm\.lr_schedule.*rounds=39 .* from then on .* the run has rounds=40"
    ):
        load({"rounds": 40, "algorithm": {"lr_schedule": {"kind": "cosine", "rounds": 39}}})


def test_what_goes_by_another_name_here_is_there(subtests: pytest.Subtests) -> None:
    for name in ALGORITHMS.elsewhere:
        with subtests.test(name):
            _, _, fix = message({"algorithm": name}).partition("here it is ")
            called, _, option = fix.partition(" with ")
            load({"algorithm": called}, option.split(" and "))


def test_layers() -> None:
    dotted = load({"population.clients": 7, "algorithm": "fedprox", "algorithm.mu": 0.5})
    assert dotted == load({"population": {"clients": 7}, "algorithm": {"name": "fedprox", "mu": 0.5}})
    config = load({"population": {"clients": 7, "dataset": "mnist"}}, ["population={clients: 8}"])
    assert (config.population.clients, config.population.dataset.name) == (8, "mnist")
    assert load({"rounds": 1}, ["rounds=2", "rounds=3"]).rounds == 3
    assert load({}, ["algorithm.lr=1e-3"]).algorithm.lr == 0.001
    assert load({}, ["until=eval/loss<=1e-3"]).until == "eval/loss<=1e-3"


def test_another_name_leaves_out_the_options_it_lacks() -> None:
    source = {"algorithm": {"name": "cdma_ada", "alpha": 2.0, "steps": 3, "lr": 0.5}}
    assert given(load(source, ["algorithm.name=fedavg"]).algorithm) == {"name": "fedavg", "steps": 3, "lr": 0.5}
    assert given(load(source, ["algorithm=parallel_sgda"]).algorithm) == {"name": "parallel_sgda", "lr": 0.5}
    either_order = ["algorithm.mu=0.5", "algorithm.name=fedprox"]
    assert load(source, either_order) == load(source, either_order[::-1])


def test_another_name_keeps_its_own_defaults_and_typing_mistakes() -> None:
    """The default server of FedOpt is Adam, also where a comparison starts from FedAvg, whose default is SGD."""
    config = with_overrides(load({"algorithm": {"name": "fedavg", "lr": 0.5}}), {"algorithm.name": "fedopt"})
    assert config.algorithm.server_optimizer.name == "adam"
    assert config.algorithm.lr == 0.5
    assert "unknown key" in message({"algorithm": {"stpes": 3}}, ["algorithm.name=fedprox"])


def test_a_written_configuration_reads_as_itself(tmp_path: Path) -> None:
    config = load({"task": "auc", "algorithm": {"name": "cdma_ada", "steps": 3}, "population.partition": "shards"})
    path = tmp_path / "config.yaml"
    asked = load(
        config.model_dump(mode="json", exclude_unset=True), {"executor": {"inner": "batched", "block_size": 4}}
    )
    for one in (config, resolve.resolved(asked, 10, 1, {}, Notes)):
        path.write_text(yaml.safe_dump(one.model_dump(mode="json")), encoding="utf-8")
        again = load(path)
        assert again.model_dump(mode="json") == one.model_dump(mode="json")
        assert all(at(again, section) == at(one, section) for section in SECTIONS if section != "algorithm.of")
    assert again.executor.inner == "batched"
    assert again.executor.block_size == 4


def test_every_default_is_written() -> None:
    raw = load({"algorithm": "cdma_ada"}).model_dump(mode="json")
    assert raw["schema_version"] == 1
    assert raw["algorithm"]["alpha"] == 0.95
    assert raw["algorithm"]["lr_schedule"]["kind"] == "constant"
    net = {"model": "mlp", "hidden": [64], "init": "drawn", "weights": None, "norm": "batch", "mixstyle": None}
    net |= {"arguments": None, "adapters": None, "metrics": [], "source": None}
    assert raw["task"] == {"name": "classification", **net}


def test_auto_does_not_depend_on_the_workers() -> None:
    config = load({"cohort.size": 50})
    more = with_overrides(config, {"executor.actors": 2, "executor.cpus_per_actor": 0.5})
    one, two = (fedfleet.Experiment(c).config.executor for c in (config, more))
    assert (one.inner, one.block_size, one.device) == (two.inner, two.block_size, two.device)


REFUSED = [
    ("rouns=3", "rouns=3: unknown key; did you mean rounds?"),
    ("population.clientz=3", "population.clientz=3: unknown key; did you mean population.clients?"),
    ("algorithm.server_optimizer.nme=adam", "did you mean algorithm.server_optimizer.name?"),
    ("population.partition=dirichlett", "did you mean 'dirichlet'?"),
    ("algorithm=FedAdam", "algorithm.name='FedAdam': here it is fedopt with algorithm.server_optimizer=adam"),
    ("algorithm=cdma_adda", "algorithm.name='cdma_adda': unknown; did you mean 'cdma_ada'?"),
    ("task=acu", "did you mean 'auc'?"), ("population.dataset=fashion-mnist", "did you mean 'fashion_mnist'"),
    ("selection=oorts", "did you mean 'oort'?"), ("xyz=1", "known here: schema_version"),
    ("lr=1", "lr=1: unknown key; did you mean algorithm.lr?"),
    ("vary={} hidden=[3]", "hidden=[3]: unknown key; did you mean task.hidden?"),
    ("algorithm.learning_rate=1", "unknown key; did you mean algorithm.lr?"),
    ("cohort.invite=3", "unknown key; did you mean cohort.size?"),
    ("cohort.respond=3", "unknown key; did you mean cohort.wait_for?"),
    ("cohort.void=skip", "unknown key; did you mean cohort.on_abort?"),
    ("algorithm.momentum=0.9", "unknown key; did you mean algorithm.client_optimizer.momentum?"),
    ("algorithm=omg algorithm.momentum=0.9", "unknown key; known here: of, kappa"),
    ("algorithm.client_optimizer=adm", "algorithm.client_optimizer='adm'"),
    ("algorithm.lr_schedule=step", "step needs every"),
    ("algorithm.lr_schedule={kind: cosine, every: 5}", "every=5 is not for cosine"),
    ("algorithm.lr_schedule={kind: constant, factor: 0.5}", "factor=0.5 is not for constant"),
    ("algorithm=cdma_one algorithm.theory={pl: 1}", "algorithm.theory.smoothness: missing"),
    ("executor.actors=many", "executor.actors='many'"), ("cohort.wait_for=0", "cohort.wait_for=0"),
    ("algorithm.steps=1 algorithm.epochs=1", "algorithm: give steps or epochs, not both"),
    ("label=3", "label=3: input should be text: quote it"),
    ("seeds=3", "write [3]"), ("algorithm={lr:0.1}", "algorithm.lr:0: unknown key: put a space after the colon"),
    ("seeds=[1, x]", "seeds.1='x'"), ("seed.deep=1", "seed="), ("schema_version=7", "schema_version=7"),
]  # fmt: skip


class Odd:
    """An object of the user's own."""


def test_messages(subtests: pytest.Subtests) -> None:
    for value in (Odd(), {1, 2}, b"3", float("nan"), 10**400, {"x": {None: 1}}, {"x": {True: 1}}):
        with subtests.test(str(value)[:40]):
            message({"rounds": value})
    for overrides, said in REFUSED:
        with subtests.test(overrides):
            assert said in message({}, re.split(r" (?=[a-z_.]+=)", overrides))


def test_a_key_is_set_in_one_place_alone(subtests: pytest.Subtests) -> None:
    label, short = {"compare": {"A": {"algorithm.lr": 0.3}, "B": {"algorithm": {"name": "scaffold"}}}}, "availability"
    section: dict[str, Any] = {"vary": {short: [{"kind": "bernoulli", "rate": 0.3}, "always"]}}
    rows: list[tuple[Any, Any, str | None]] = [
        (
            {"vary": {"availability.rate": [0.9], **section["vary"]}},
            {},
            "vary.availability.rate and vary.availability: both",
        ),
        (
            {"vary": {"cohort.size": [5], "cohort": [{"size": 4}]}},
            {},
            "vary.cohort.size and vary.cohort: both set cohort.size",
        ),
        (
            {"vary": {"availability.kind": ["always"], short: ["always"]}},
            {},
            "vary.availability.kind and vary.availability",
        ),
        ({"vary": {"availability.rate": [0.9], short: [{"kind": "label_correlated", "strength": 1.0}]}}, {}, None),
        ({**label, "vary": {"algorithm.lr": [0.1]}}, {}, "compare.A and vary.algorithm.lr: both set algorithm.lr"),
        (label, {"algorithm.lr": 0.1}, "algorithm.lr=0.1: compare.A sets it to 0.3"),
        (label, {"algorithm": "fedprox"}, "algorithm.name='fedprox': compare.B sets it to 'scaffold'"),
        (section, {short: "label_correlated"}, "availability.kind='label_correlated': vary.availability sets it"),
        (
            {"tune": {"search": {"algorithm.lr": [1]}, "metric": "eval/loss"}},
            {"algorithm.lr": 2},
            "algorithm.lr=2: tune.search",
        ),
        ({}, {"seed": 5, "seeds": [2, 3]}, "seed=5: seeds=[2, 3] is given, too"),
        (label, {"algorithm.lr": 0.3}, None),
        (label, {"compare.A.algorithm.lr": 0.1}, None),
        (label, {"algorithm.lr": 0.1, "compare": {"A": {"algorithm.lr": 0.2}}}, None),
        (section, {short: "label_correlated", "vary": {"availability.rate": [0.5]}}, None),
    ]
    assert [t.config.seed for t in planned(load({"seeds": [0, 1]}, {"seed": 5}))] == [5]
    for given, overrides, said in rows:
        with subtests.test(f"{given} {overrides}"):
            if said is None:
                planned(load(given, overrides))
            else:
                refused(lambda given=given, overrides=overrides: planned(load(given, overrides)), said)


def test_python_values_of_other_types() -> None:
    numpy = pytest.importorskip("numpy")
    values = {"rounds": numpy.int64(3), "seeds": (1, 2), "warm_start": Path("a") / "b", "max_seconds": numpy.float32(2)}
    config = load(values)
    found = (config.rounds, config.seeds, config.warm_start, config.max_seconds)
    assert found == (3, [1, 2], str(Path("a") / "b"), 2.0)


KEYS = [
    "rounds", "seed", "seeds", "label", "until", "compare", "vary", "population", "task", "algorithm", "cohort", "executor",
    "availability", "devices", "evaluation", "name", "kind", "partition", "clients", "model", "hidden", "lr", "steps", "rate",
    "server_optimizer", "theory", "invite", "respond", "actors", "dataset", "alpha", "warm_start", "max_seconds",
]  # fmt: skip
NAMES = ["fedavg", "cdma_ada", "auc", "dirichlet", "bernoulli", "auto", "local", "all", "siwer", "digits", "adam"]
KEY = (
    st.sampled_from(KEYS) | st.lists(st.sampled_from(KEYS), min_size=2, max_size=3).map(".".join) | st.text(max_size=8)
)
LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(NAMES) | st.dates()
    | st.integers(0, 50) | st.floats(0, 1)
)  # fmt: skip
VALUE = st.recursive(LEAF, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEY, v, max_size=4), max_leaves=8)


@drawn(st.dictionaries(KEY | st.integers() | st.none(), VALUE, max_size=4), st.lists(st.tuples(KEY, VALUE), max_size=3))
def test_any_mapping_is_a_configuration_or_one_line(source: dict[Any, Any], overrides: list[tuple[str, Any]]) -> None:
    config = checked(source, dict(overrides))
    if config is not None:
        assert load(config.model_dump(mode="json")).model_dump(mode="json") == config.model_dump(mode="json")


@drawn(
    st.lists(st.builds("{}={}".format, KEY, VALUE.map(str) | st.text(max_size=12)) | st.text(max_size=20), max_size=3)
)
def test_any_override_gives_a_configuration_or_one_line(overrides: list[str]) -> None:
    checked({}, overrides)


@drawn(st.binary(max_size=60) | st.text(alphabet="ab:-[]{}#&*!|>'\"\\\n\t 01.e?,%@`", max_size=60).map(str.encode))
def test_any_file_is_a_configuration_or_one_line(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text)
    checked(path)
