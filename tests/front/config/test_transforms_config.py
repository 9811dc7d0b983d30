"""Transforms in a configuration: how they are read and written, and what is refused, in one line, before any work."""

from __future__ import annotations

from typing import Any

from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.middleware.compression.codecs.registry import TRANSFORMS
from tests.middleware.compression.complete import complete
from tests.refusals import all_refused, refused

BASE: dict[str, Any] = {
    "rounds": 1,
    "population": {"clients": 20},
    "task": {"name": "classification", "model": "logistic"},  # 650 floats
    "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 5},
    "executor": {"kind": "local", "inner": "serial", "block_size": 4},
}
OWED = {"name": "top_k", "share": 0.1, "error_feedback": True}


def test_names_stand_for_their_defaults_and_lists_take_the_place_of_lists():
    found = load(BASE, {"transforms.up": ["rotation", {"name": "uniform", "levels": 4}]})
    want = [{"name": "rotation"}, {"name": "uniform", "levels": 4, "by": "slot"}]
    assert found.model_dump(mode="json")["transforms"] == {"up": want, "down": []}
    assert load(found.model_dump(mode="json")).transforms == found.transforms
    assert load(BASE).transforms.up == []
    given = {**BASE, "transforms": {"up": ["sign"]}}
    assert [t.name for t in load(given, ["transforms.up=[qsgd]"]).transforms.up] == ["qsgd"]
    assert load(given, ["transforms.up=[]"]).transforms.up == []
    assert load(given, {"vary": {"transforms.up": [[], ["sign"]]}}).vary == {"transforms.up": [[], ["sign"]]}


FEDBUFF = {"algorithm": {"name": "fedbuff", "buffer": 3, "concurrency": 5}}
UNREAD = [
    (["topk"], "transforms.up[0].name='topk': unknown; did you mean 'top_k'?"), ([3], "transforms.up[0]=3"),
    ([{"share": 0.1}], "transforms.up[0]={'share': 0.1}"),
    ([{"name": "top_k", "share": 0}], "transforms.up[0].share=0"),
    ([{"name": "top_k", "share": 1.5}], "transforms.up[0].share=1.5"),
    ([{"name": "top_k", "k": 0}], "transforms.up[0].k=0"), (["top_k"], "transforms.up[0]"),
    ([{"name": "top_k", "k": 3, "share": 0.1}], "transforms.up[0]"),
    ([{"name": "top_k", "k": 3, "levels": 2}], "transforms.up[0].levels=2"),
    (["sign", {"name": "qsgd", "levels": 0}], "transforms.up[1].levels=0"),
    (["sign", "qsgd"], "transforms.up[1].name='qsgd'"), (["low_rank", "bf16"], "transforms.up[1].name='bf16'"),
    ([{"name": "random_k", "k": 3, "error_feedback": True, "unbiased": True}], "transforms.up[0]"),
    *(([{"name": name, "error_feedback": True}], "transforms.up[0]") for name in ("qsgd", "ternary", "uniform", "rotation")),
    (["rotation", OWED], "transforms.up[1].error_feedback=true"), ("sign", "transforms.up='sign'"),
]  # fmt: skip
REFUSED = [
    ({"transforms.up": [{"name": "top_k", "k": 651}]}, "transforms.up[0].k=651"),
    ({"transforms.up": [OWED], "cohort.late": "keep", "cohort.wait_for": 5}, "cohort.late='keep': a late answer"),
    ({"transforms.up": [OWED], **FEDBUFF}, "transforms.up[0].error_feedback=true"),
    ({"transforms.up": [OWED], "algorithm": {"name": "drfa"}, "domains.kind": "label"}, "transforms.up[0].error_feedback=true"),
    ({"transforms.up": [OWED, {"name": "qsgd", "levels": 8}]}, "transforms.up[1].name='qsgd'"),
    ({"transforms.up": [OWED, "ternary"]}, "transforms.up[1].name='ternary'"),
    ({"transforms.up": [OWED, {"name": "random_k", "share": 0.4}]}, "transforms.up[1].name='random_k'"),
    ({"transforms.up": [OWED, {"name": "uniform", "levels": 6}]}, "transforms.up[1].name='uniform'"),
    ({"transforms.up": ["delta"]}, "transforms.up[0].name='delta'"),
    ({"transforms.down": ["sign"]}, "transforms.down[0].name='sign'"),
    ({"transforms.down": ["low_rank"]}, "transforms.down[0].name='low_rank'"),
    ({"transforms.down": [{"name": "top_k", "k": 3}]}, "transforms.down[0].name='top_k'"),
    ({"transforms.down": [{"name": "random_k", "k": 3}]}, "transforms.down[0].name='random_k'"),
    ({"transforms.down": ["delta"]}, "transforms.down=['delta']"),
    ({"transforms.down": ["rotation", "delta"]}, "transforms.down[1].name='delta'"),
    ({"transforms.down": [{"name": "clip", "norm": 1.0}]}, "transforms.down[0].name='clip'"),
    ({"transforms.down": ["delta", OWED]}, "transforms.down[1].error_feedback=true"),
    ({"transforms.down": "bf16"}, "transforms.down='bf16'"),
    ({"transforms.down": ["delta", "ternary"]}, "transforms.down[1].name='ternary'"),
    ({"transforms.down": ["delta", "bf16"], "cohort.late": "keep"}, "cohort.late='keep': a late answer"),
    ({"transforms.down": ["delta", "bf16"], **FEDBUFF}, "transforms.down[0].name='delta'"),
]  # fmt: skip
TIMES = [("ternary", "8.1 times"), ({"name": "uniform", "levels": 6}, "1.3 times")]


def test_what_cannot_be_read_or_cannot_work_is_refused(subtests):
    all_refused(subtests, lambda up: load(BASE, {"transforms.up": up}), UNREAD)
    all_refused(subtests, lambda changes: Experiment(load(BASE, changes)), REFUSED)
    for after, times in TIMES:
        changes = {"transforms.up": [OWED, after]}
        assert times in refused(lambda changes=changes: Experiment(load(BASE, changes)), "transforms.up[1]")


def test_without_feedback_an_asynchronous_server_and_late_answers_take_all(subtests):
    for name in sorted({*TRANSFORMS} - {"delta"}):
        up = [complete(name, 650)]
        for changes in (FEDBUFF, {"cohort.late": "keep"}):
            with subtests.test(f"{name} {changes}"):
                assert Experiment(load(BASE, {"transforms.up": up, **changes})).algorithm.phases[0].uplink
    (down,) = Experiment(load(BASE, {**FEDBUFF, "transforms.down": ["bf16"]})).config.transforms.down
    assert (down.name, down.error_feedback) == ("bf16", False)


def test_what_adds_less_than_arrives_may_follow_feedback():
    qsgd, uniform = ({"name": name, "levels": levels} for name, levels in (("qsgd", 9), ("uniform", 6)))
    for after in ([qsgd], ["rotation", uniform], [{"name": "random_k", "share": 0.6}]):
        assert Experiment(load(BASE, {"transforms.up": [OWED, *after]}))


def test_the_clock_and_the_plan_are_told_what_is_really_sent():
    up = [{"name": "top_k", "share": 0.01, "error_feedback": True}]
    more = {"devices": "lognormal", "executor.inner": "factored"}
    plain, small = (Experiment(load(BASE, {"transforms.up": t, **more})) for t in ([], up))
    assert plain.costs.bytes_up == {"train": 4 * 650}
    assert small.costs.bytes_up == {"train": 7 * 4 + 9}  # 7 of 650, each with a place of 10 bits
    said = dict(describe(small))
    assert said["transforms up"] == "top_k"
    assert said["traffic a round"] == "about 0.00037 MB up, at least 0.026 MB down, if all answer"
    assert "until transforms.up multiplies out what is sent" in said["factored weights"]
    assert "transforms up" not in dict(describe(plain))
    said = dict(describe(Experiment(load(BASE, {"algorithm": "scaffold", "cohort.size": 10}))))  # and a control variate
    assert said["traffic a round"] == "about 0.052 MB up, at least as much down, if all answer"
    half, most = ({"transforms.down": down, "cohort.size": 10} for down in (["bf16"], ["delta", "sign"]))
    said = dict(describe(Experiment(load(BASE, half))))
    assert said["transforms down"] == "bf16"
    assert said["traffic a round"] == "about 0.026 MB up, 0.0131 MB down, if all answer"  # 10 of 1,300 bytes and a rate
    said = dict(describe(Experiment(load(BASE, most))))
    assert said["traffic a round"].endswith("at most 0.026 MB down, if all answer")
