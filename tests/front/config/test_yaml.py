"""A configuration file means what it says: nothing in it is dropped, or read as another number than it looks."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.config.reading import parse

KEYS = st.text("abcdef", min_size=1, max_size=3)
TREES = st.recursive(
    st.integers(-9, 9) | KEYS, lambda t: st.dictionaries(KEYS, t, max_size=3) | st.lists(t, max_size=3)
)


@given(TREES, st.booleans())
def test_what_has_every_key_once_is_read_as_it_is(tree, flow):
    assert parse(yaml.safe_dump(tree, default_flow_style=flow)) == tree


@given(st.lists(KEYS, min_size=1, max_size=3), st.dictionaries(KEYS, st.integers(0, 9), min_size=1), st.data())
def test_a_key_given_twice_is_refused_however_deep_it_lies(path, mapping, data):
    again = data.draw(st.sampled_from(sorted(mapping)))
    inner = ", ".join(f"{key}: {value}" for key, value in [*mapping.items(), (again, 1)])
    text = "".join(f"{{{key}: " for key in path) + f"[{{{inner}}}]" + "}" * len(path)
    with pytest.raises(ValueError, match=f"key '{again}' is given twice"):
        parse(text)


def test_a_merged_key_may_be_given_another_value():
    found = parse("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a, y: 4}")
    assert (found["b"], found["c"]) == ({"x": 3, "y": 2}, {"x": 1, "y": 4})


def test_numbers_are_what_they_look_like(subtests):
    for text in ("1:30", "-1:30", "190:20:30.15", "010", "-017", "0_7"):
        with subtests.test(text), pytest.raises(ValueError, match="quote it"):
            parse(f"a: {text}")
    taken = {
        "0": 0,
        "-7": -7,
        "1_000": 1000,
        "0x1F": 31,
        "0b11": 3,
        "1e-3": 0.001,
        "0.5": 0.5,
        "'010'": "010",
        "0.07": 0.07,
    }
    for text, value in taken.items():
        with subtests.test(text):
            assert parse(f"a: {text}")["a"] == value
