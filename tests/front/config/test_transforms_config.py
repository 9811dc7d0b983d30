"""Transforms in a configuration: how they are read and written, and what is refused, in one line, before any work."""

from __future__ import annotations

from typing import Any

import pytest

from fedfleet.commands.plan import describe
from fedfleet.config.schema import complete, load
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.errors import ConfigError
from fedfleet.transforms.registry import TRANSFORMS

BASE: dict[str, Any] = {
    "rounds": 1,
    "population": {"clients": 20},
    "task": {"name": "classification", "model": "logistic"},  # 650 floats
    "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 5},
    "executor": {"kind": "local", "inner": "serial", "block_size": 4},
}
OWED = {"name": "top_k", "share": 0.1, "feedback": True}


def test_names_stand_for_their_defaults_which_are_written_out():
    found = load(BASE, {"transforms.up": ["rotation", {"name": "uniform", "levels": 4}]})
    want = [{"name": "rotation"}, {"name": "uniform", "levels": 4, "by": "slot"}]
    assert found.transforms.up == want
    assert complete(found)["transforms"] == {"up": want, "down": []}
    assert load(complete(found)).transforms == found.transforms
    assert load(BASE).transforms.up == []


def test_lists_take_the_place_of_lists_and_may_vary():
    given = {**BASE, "transforms": {"up": ["sign"]}}
    assert [t["name"] for t in load(given, ["transforms.up=[qsgd]"]).transforms.up] == ["qsgd"]
    assert load(given, ["transforms.up=[]"]).transforms.up == []
    assert load(given, {"vary": {"transforms.up": [[], ["sign"]]}}).vary == {"transforms.up": [[], ["sign"]]}


UNREAD = [
    (["topk"], ["transforms.up[0].name='topk'", "did you mean 'top_k'?"]),
    ([3], ["transforms.up[0]=3", "give a name"]),
    ([{"share": 0.1}], ["transforms.up[0]={'share': 0.1}", "give a name"]),
    ([{"name": "top_k", "share": 0}], ["transforms.up[0].share=0", "greater than 0"]),
    ([{"name": "top_k", "share": 1.5}], ["transforms.up[0].share=1.5", "less than or equal to 1"]),
    ([{"name": "top_k", "k": 0}], ["transforms.up[0].k=0", "greater than or equal to 1"]),
    (["top_k"], ["transforms.up[0]", "give share", "or k"]),
    ([{"name": "top_k", "k": 3, "share": 0.1}], ["transforms.up[0]", "and not both"]),
    ([{"name": "top_k", "k": 3, "levels": 2}], ["transforms.up[0].levels=2", "unknown key", "feedback"]),
    (["sign", {"name": "qsgd", "levels": 0}], ["transforms.up[1].levels=0", "greater than or equal to 1"]),
    (["sign", "qsgd"], ["transforms.up[1].name='qsgd'", "sign leaves no floats behind it"]),
    (["low_rank", "bf16"], ["transforms.up[1].name='bf16'", "low_rank leaves no floats behind it"]),
    (
        [{"name": "random_k", "k": 3, "feedback": True, "unbiased": True}],
        ["transforms.up[0]", "d/k", "the error would grow"],
    ),
    *(
        ([{"name": name, "feedback": True}], ["transforms.up[0]", "feedback is for what loses a part", "leave it out"])
        for name in ("qsgd", "ternary", "uniform", "rotation")
    ),
    (["rotation", OWED], ["transforms.up[1].feedback=true", "rotation leaves other coordinates each time"]),
    ("sign", ["transforms.up='sign'", "list"]),
]


@pytest.mark.parametrize(("up", "says"), UNREAD)
def test_what_cannot_be_read_is_refused(up, says):
    with pytest.raises(ConfigError) as e:
        load(BASE, {"transforms.up": up})
    assert all(text in str(e.value) for text in says), e.value
    assert "\n" not in str(e.value)


REFUSED = [
    ({"transforms.up": [{"name": "top_k", "k": 651}]}, ["transforms.up[0].k=651", "650 floats at most", "lower it"]),
    ({"transforms.up": [OWED], "cohort.late": "keep", "cohort.respond": 5}, ["cohort.late='keep'", "moved on"]),
    (
        {"transforms.up": [OWED], "algorithm": {"name": "fedbuff", "buffer": 3, "concurrency": 5}},
        ["transforms.up[0].feedback=true", "fedbuff is asynchronous"],
    ),
    (
        {"transforms.up": [OWED], "algorithm": {"name": "drfa"}, "domains.kind": "label"},
        ["transforms.up[0].feedback=true", "drfa may ask a client twice"],
    ),
    (
        {"transforms.up": [OWED, {"name": "qsgd", "levels": 8}]},
        ["transforms.up[1].name='qsgd'", "of the 65 numbers", "1 times"],
    ),
    ({"transforms.up": [OWED, "ternary"]}, ["transforms.up[1].name='ternary'", "8.1 times", "would grow"]),
    ({"transforms.up": [OWED, {"name": "random_k", "share": 0.4}]}, ["transforms.up[1].name='random_k'", "would grow"]),
    ({"transforms.up": [OWED, {"name": "uniform", "levels": 6}]}, ["transforms.up[1].name='uniform'", "1.3 times"]),
    ({"transforms.up": ["delta"]}, ["transforms.up[0].name='delta'", "as a difference anyhow", "leave it out"]),
    ({"transforms.down": ["sign"]}, ["transforms.down[0].name='sign'", "put delta before it"]),
    ({"transforms.down": ["low_rank"]}, ["transforms.down[0].name='low_rank'", "put delta before it"]),
    ({"transforms.down": [{"name": "top_k", "k": 3}]}, ["transforms.down[0].name='top_k'", "put delta before it"]),
    (
        {"transforms.down": [{"name": "random_k", "k": 3}]},
        ["transforms.down[0].name='random_k'", "put delta before it"],
    ),
    ({"transforms.down": ["delta"]}, ["transforms.down=['delta']", "as large as the model"]),
    ({"transforms.down": ["rotation", "delta"]}, ["transforms.down[1].name='delta'", "let delta be the first"]),
    ({"transforms.down": [{"name": "clip", "norm": 1.0}]}, ["transforms.down[0].name='clip'", "leave it out"]),
    ({"transforms.down": ["delta", OWED]}, ["transforms.down[1].feedback=true", "delta remembers"]),
    ({"transforms.down": "bf16"}, ["transforms.down='bf16'", "list"]),
    (
        {"transforms.down": ["delta", "ternary"]},
        ["transforms.down[1].name='ternary'", "of the 650 numbers", "with delta before"],
    ),
    ({"transforms.down": ["delta", "bf16"], "cohort.late": "keep"}, ["cohort.late='keep'", "leave one of them out"]),
    (
        {"transforms.down": ["delta", "bf16"], "algorithm": {"name": "fedbuff", "buffer": 3, "concurrency": 5}},
        ["transforms.down[0].name='delta'", "fedbuff is asynchronous", "leave it out"],
    ),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_cannot_work_is_refused(changes, says):
    with pytest.raises(ConfigError) as e:
        Experiment(load(BASE, changes))
    assert all(text in str(e.value) for text in says), e.value
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", sorted({*TRANSFORMS} - {"delta"}))
def test_without_feedback_an_asynchronous_server_and_late_answers_take_all(name):
    up = [{"name": name, **({"k": 650} if name.endswith("_k") else {"norm": 1.0} if name == "clip" else {})}]
    for changes in ({"algorithm": {"name": "fedbuff", "buffer": 3, "concurrency": 5}}, {"cohort.late": "keep"}):
        assert Experiment(load(BASE, {"transforms.up": up, **changes})).algorithm.phases[0].uplink


@pytest.mark.parametrize(
    "after",
    [
        [{"name": "qsgd", "levels": 9}],
        ["rotation", {"name": "uniform", "levels": 6}],
        [{"name": "random_k", "share": 0.6}],
    ],
)
def test_what_adds_less_than_arrives_may_follow_feedback(after):
    assert Experiment(load(BASE, {"transforms.up": [OWED, *after]}))


def test_the_clock_and_the_plan_are_told_what_is_really_sent():
    up = [{"name": "top_k", "share": 0.01, "feedback": True}]
    more = {"devices": "lognormal", "executor.inner": "factored"}
    plain, small = (Experiment(load(BASE, {"transforms.up": t, **more})) for t in ([], up))
    assert plain.costs.bytes_up == {"train": 4 * 650}
    assert small.costs.bytes_up == {"train": 7 * 4 + 9}  # 7 of 650, each with a place of 10 bits
    said = dict(describe(small))
    assert said["transforms up"] == "top_k"
    assert said["traffic a round"] == "about 0.00037 MB up, at least 0.026 MB down, if all answer"
    assert "until transforms.up multiplies out what is sent" in said["factored weights"]
    assert "transforms up" not in dict(describe(plain))


def test_the_plan_counts_what_a_client_really_sends_and_not_models():
    scaffold = {"algorithm": "scaffold", "cohort.invite": 10}
    said = dict(describe(Experiment(load(BASE, scaffold))))
    assert said["traffic a round"] == "about 0.052 MB up, at least as much down, if all answer"  # and a control variate


def test_the_plan_says_what_the_way_down_takes():
    half, most = ({"transforms.down": down, "cohort.invite": 10} for down in (["bf16"], ["delta", "sign"]))
    said = dict(describe(Experiment(load(BASE, half))))
    assert said["transforms down"] == "bf16"
    assert said["traffic a round"] == "about 0.026 MB up, 0.0131 MB down, if all answer"  # 10 of 1,300 bytes and a rate
    assert dict(describe(Experiment(load(BASE, most))))["traffic a round"].endswith(
        "at most 0.026 MB down, if all answer"
    )


def test_an_asynchronous_server_may_send_less_of_each_version():
    changes = {"algorithm": {"name": "fedbuff", "buffer": 3, "concurrency": 5}, "transforms.down": ["bf16"]}
    assert Experiment(load(BASE, changes)).config.transforms.down == [{"name": "bf16", "feedback": False}]
