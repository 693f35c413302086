"""The -k option, checked against Python's evaluation of the same expression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ext.results import TestName
from torch_ext.runner.selection import SelectionError, keyword_filter

TEST = TestName("distributed/test_fsdp.py", "TestInput", "test_type_dict")
WORDS = ["fsdp", "TestInput", "dict", "rpc", "testinput", "tuple"]
EXPRESSIONS = st.recursive(
    st.sampled_from(WORDS),
    lambda inner: st.one_of(
        inner.map("not {}".format),
        inner.map("({})".format),
        st.builds("{} and {}".format, inner, inner),
        st.builds("{} or {}".format, inner, inner),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("word", "fits"),
    [
        ("dict", True),
        ("Dict", True),
        ("TestInput.test_type", True),
        ("TestInput::test_type", True),
        ("test_fsdp.TestInput", True),
        ("distributed/test_f", True),
        ("test_type_*", True),
        ("*dict", True),
        ("type_*", False),
        ("Test?nput", True),
        ("test_[st]ype_dict", True),
        ("*fsdp*tuple*", False),
    ],
)
def test_a_word_is_a_part_of_the_name_or_a_glob(word: str, fits: bool) -> None:
    assert keyword_filter([word])(TEST) is fits


def test_several_options_are_alternatives_and_none_lets_all_through() -> None:
    assert keyword_filter(["rpc", "dict"])(TEST)
    assert not keyword_filter(["rpc", "tuple"])(TEST)
    assert keyword_filter([])(TEST)


@given(EXPRESSIONS)
def test_expressions_mean_what_they_mean_in_python(text: str) -> None:
    assert keyword_filter([text])(TEST) == eval(text, {}, {word: word.lower() in TEST.id.lower() for word in WORDS})


@pytest.mark.parametrize(
    "text",
    ["a and", "not", "and a", "a or or b", "(a or b", "a)", "a b", "a (b)", "()", "a AND b", "lambda a", "(" * 999],
)
def test_an_incomplete_expression_is_refused(text: str) -> None:
    with pytest.raises(SelectionError) as raised:
        keyword_filter([text])
    assert str(raised.value) == f"got -k {text!r}, expected names joined by 'and', 'or', 'not' and parentheses"
