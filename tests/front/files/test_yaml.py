"""A configuration file means what it says: nothing in it is dropped, or read as another number than it looks."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.config.reading import plain
from fedfleet.config.schema import load
from fedfleet.files.documents import dump, parse, parse_json
from tests.refusals import refused

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


@given(st.sampled_from(["uniform(0, 1)", "choice(fedavg, fedprox)", "quniform(1, 9, 2)"]), st.booleans(), st.booleans())
def test_a_value_that_ends_at_its_own_comma_is_refused(value, more, quoted):
    text = f"{{a: {value!r}" if quoted else f"{{a: {value}"
    text += ", b: (x}" if more else "}"
    if quoted:
        assert parse(text) == {"a": value} | ({"b": "(x"} if more else {})
    elif value.count(",") == 1:
        with pytest.raises(ValueError, match="ends at its comma within braces"):
            parse(text)


EQUAL = ("1 1.0", "1 true", "0x1 1.0", "0 false", "7 '7'", "1e3 1000")
"""Keys that Python takes for one, or that are written alike."""


@given(st.sampled_from(EQUAL), st.permutations([0, 1]))
def test_keys_that_are_one_to_a_mapping_or_to_a_reader_are_refused(pair, order):
    keys = pair.split()
    with pytest.raises(ValueError, match="is given twice"):
        parse("{" + ", ".join(f"{keys[i]}: {i}" for i in order) + "}")


@given(st.sampled_from(["algorithm.lr", "population.clients", "population.dataset.name"]), st.booleans())
def test_a_key_by_its_section_and_by_dots_is_refused_in_a_file(tmp_path_factory, key, first):
    *above, last = key.split(".")
    value = "digits" if last == "name" else 3
    nested = {last: value}
    for name in reversed(above):
        nested = {name: nested}
    both = [nested, {key: value}]
    path = tmp_path_factory.mktemp("c") / "c.yaml"
    path.write_text("".join(yaml.safe_dump(one) for one in (both if first else both[::-1])))
    refused(lambda: load(path), f"{key}=")
    assert load({}, {key: value})


@given(
    st.lists(st.tuples(st.dictionaries(KEYS, st.integers(0, 9), max_size=3), st.lists(st.integers(0, 9), max_size=3)))
)
def test_mappings_are_merged_as_yaml_says(mappings):
    """Each merges some of those before it: the first of them has the say, and its own keys before all."""
    lines, merged = [], []
    for i, (own, wanted) in enumerate(mappings):
        of = [k for k in wanted if k < i]
        merges = [f"*m{of[0]}" if len(of) == 1 else f"[{', '.join(f'*m{k}' for k in of)}]"] if of else []
        inner = ", ".join([f"{k}: {v}" for k, v in own.items()] + [f"<<: {m}" for m in merges])
        lines.append(f"{i}: &m{i} {{{inner}}}")
        whole = {}
        for k in reversed(of):
            whole |= merged[k]
        merged.append(whole | own)
    assert list((parse("\n".join(lines)) or {}).values()) == merged


def test_merges_that_yaml_does_not_define_are_refused(subtests):
    for text in ("{<<: *a, <<: *b}", "{<<: 3}", "{<<: [*a, 3]}", "{<<: [[*a]]}", "{<<: }", "{1: 2, 0x1: 3}"):
        with subtests.test(text), pytest.raises(ValueError, match=r"^[^\n]*in line 3"):
            parse(f"a: &a {{x: 1}}\nb: &b {{x: 2}}\nc: {text}")


TAGGED = {
    "null": ("", "~", "null", "'null'"),
    "bool": ("yes", "OFF", "'true'"),
    "int": ("7", "-0x1F", "'7'", "1_000"),
    "float": ("7", "1.5", "1e3", "'.5e3'"),
    "str": ("", "x", "null", "010", "1:30", "yes"),
    "seq": ("[1]",),
    "map": ("{x: 1}",),
}
"""Values that may stand behind each tag of plain data."""
ELSE = (
    "x",
    "0",
    "[0o7]",
    "0.5",
    "-0",
    "nan",
    "1:30",
    "0o7",
    "2026-11-27",
    "{=: yes, x: 1}",
    "{=: }",
    "=",
    "<<",
    "\u0663",
)


@given(st.sampled_from([*TAGGED, "binary", "set", "timestamp", "omap", "pairs", "merge", "value", "x"]), st.data())
def test_a_tag_says_what_stands_there_anyway_or_is_refused(tag, data):
    text = data.draw(st.sampled_from([*ELSE, *(text for texts in TAGGED.values() for text in texts)]))
    given = f"a: !!{tag} {text}"
    if text not in TAGGED.get(tag, ()):
        try:
            parse(given)
        except ValueError:
            return
    result = parse(given)["a"]
    bare = text.strip("'")
    assert type(result).__name__ == {"null": "NoneType", "seq": "list", "map": "dict"}.get(tag, tag)
    assert result == (bare if tag == "str" else parse(f"a: {bare}")["a"])


def test_tags_and_documents_that_say_something_else_are_refused(subtests):
    for text in (
        *(
            "! 12",
            "! yes",
            "!mine 3",
            "!!null x",
            "!!null 0",
            "!!int 1.5",
            "!!int x",
            "!!int ''",
            "!!bool x",
            "!!bool 1",
        ),
        *("!!bool yEs", "!!float nan", "!!float x", "!!float 010", "!!binary aGk=", "!!set {x, y}", "!!omap [x: 1]"),
        *(
            "!!timestamp 2026-11-27",
            "!!pairs [x: 1]",
            "!!str {=: x, y: z}",
            "!!map [1]",
            "!!seq {x: 1}",
            "!!python/tuple [1]",
        ),
    ):
        with subtests.test(text), pytest.raises(ValueError, match=r"^the tag '[^\n]*' in line 2 |in base 8"):
            parse(f"a: 1\nb: {text}")
    for text in (
        "%YAML 1.2\n---\na: on",
        "a: 1\n---\na: 2",
        "a: &x 1\nb: &x 2\nc: *x",
        "%TAG !! tag:x,2002:\n---\na: !!int 3",
    ):
        with subtests.test(text), pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            parse(text)
    assert parse("%YAML 1.1\n---\na: on") == {"a": True}


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t\n\r")) | st.from_regex(
    r"[-+]?(0[xob]?)?[0-9_]*\.?[0-9]*([eE][-+]?[0-9]+)?|[0-9]+(:[0-5][0-9])+|20[0-9]{2}-[01][0-9]-[0-2][0-9]",
    fullmatch=True,
)


@given(
    st.recursive(
        TEXTS | st.none() | st.booleans() | st.floats(allow_nan=False),
        lambda t: st.dictionaries(TEXTS, t),
        max_leaves=4,
    )
)
def test_what_is_written_is_read_as_the_same_text(value):
    assert parse(dump(value)) == value


@given(st.characters(categories=["Cc"], exclude_characters="\0\t\n\r"), st.booleans())
def test_text_that_tells_a_terminal_what_to_do_is_refused(control, as_key):
    text = json.dumps({f"a{control}": "b"} if as_key else {"a": f"b{control}"})
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        parse(text)
    assert control not in str(parse_json(text))
    refused(lambda: plain({"label": f"b{control}"}), "label=")


def test_numbers_are_what_they_look_like(subtests):
    for text in ("1:30", "-1:30", "190:20:30.15", "010", "-017", "0_7", "0o17", "-0o7"):
        with subtests.test(text), pytest.raises(ValueError, match="quote it"):
            parse(f"a: {text}")
    taken = {
        "0": 0,
        "-7": -7,
        "1_000": 1000,
        "0x1F": 31,
        "0b11": 3,
        "1e-3": 0.001,
        ".5e3": 500.0,
        "-.5E-1": -0.05,
        "1_000e3": 1e6,
        "0.5": 0.5,
        "'010'": "010",
        "0.07": 0.07,
    }
    for text, value in taken.items():
        with subtests.test(text):
            assert parse(f"a: {text}")["a"] == value
