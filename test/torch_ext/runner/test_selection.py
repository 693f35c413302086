"""The tests that patterns select, checked against handwritten cases.

A failure here means that a user runs other tests than the ones named, or none, without a message.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ext.results import TestName
from torch_ext.runner.selection import SelectionError, keyword_filter, select_files, select_tests

PREFIXES = ("test.", "test/", "/home/me.too/test/")
INPUT = "distributed/fsdp/test_fsdp_input.py"
OTHER = "distributed/fsdp/test_other.py"
RPC = "distributed/rpc/test_rpc.py"
RPC_INPUT = "distributed/rpc/test_fsdp_input.py"
TOP = "test_top.py"
TESTS = [
    TestName(INPUT, "TestInput", "test_dict"),
    TestName(INPUT, "TestInput", "test_tuple"),
    TestName(INPUT, "TestMore", "test_dict"),
    TestName(OTHER, "TestOther", "test_other"),
    TestName(RPC, "TestRpc", "test_call"),
    TestName(RPC_INPUT, "TestInput", "test_dict"),
    TestName(TOP, "TestTop", "test_top"),
]
FILES = [INPUT, OTHER, RPC_INPUT, RPC, TOP]


def choose(include=(), exclude=(), tests=TESTS):
    """Return the files that are imported and the ids that are selected."""
    files = sorted({test.file for test in tests})
    selection = select_files(files, include, exclude, PREFIXES)
    known = [test for test in tests if test.file in selection.files]
    return list(selection.files), [test.id for test in select_tests(selection, known)[0]]


def ids(*numbers):
    return [TESTS[number].id for number in numbers]


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        *[(text, (0, 1, 2, 3)) for text in ("distributed/fsdp", "test/distributed/fsdp/", "test.distributed.fsdp")],
        *[(text, (0, 1, 2, 3, 4, 5)) for text in ("distributed", "distributed/", "./distributed")],
        *[(text, (0, 1, 2)) for text in (INPUT, INPUT[:-3], f"test/{INPUT}", INPUT[:-3].replace("/", "."))],
        *[(text, (0, 1, 2)) for text in ("fsdp/test_fsdp_input", "fsdp.test_fsdp_input", f"/home/me.too/test/{INPUT}")],
        *[(text, (0, 1, 2, 5)) for text in ("test_fsdp_input", "test_fsdp_input.py")],
        *[(text, (0, 1, 2, 3, 4, 5, 6)) for text in ("test", "test/", ".")],
        *[(text, (0, 1)) for text in (f"{INPUT}::TestInput", "fsdp.test_fsdp_input.TestInput")],
        ("distributed.fsdp.test_fsdp_input::TestInput", (0, 1)),
        *[(text, (0, 1, 5)) for text in ("TestInput", "test_fsdp_input.TestInput", "test_fsdp_input.py::TestInput")],
        *[(text, (0, 5)) for text in ("TestInput.test_dict", "TestInput::test_dict")],
        *[(text, (0, 2)) for text in (f"{INPUT}::test_dict", "fsdp.test_fsdp_input.test_dict")],
        ("test_dict", (0, 2, 5)),
        ("test_call", (4,)),
        (f"{INPUT}::TestInput::test_dict", (0,)),
        (f"test/{INPUT}::TestInput.test_dict", (0,)),
        ("test.distributed.fsdp.test_fsdp_input.TestInput.test_dict", (0,)),
        # A file wins over a test of the same name, which can still be selected with its file.
        ("test_other", (3,)),
        ("TestTop.test_top", (6,)),
    ],
)
def test_every_spelling_selects_its_tests(pattern, numbers):
    assert choose([pattern])[1] == ids(*numbers)
    rest = [number for number in range(len(TESTS)) if number not in numbers]
    assert choose(exclude=[pattern])[1] == ids(*rest)


@pytest.mark.parametrize(
    ("include", "exclude", "files"),
    [
        (["distributed/fsdp"], [], [INPUT, OTHER]),
        (["distributed/fsdp"], ["test_other.py"], [INPUT]),
        (["distributed/fsdp"], ["TestOther"], [INPUT, OTHER]),
        ([f"{INPUT}::TestInput::test_dict"], [], [INPUT]),
        (["rpc.test_fsdp_input.TestInput"], [], [RPC_INPUT]),
        (["TestInput"], [], FILES),
        (["TestInput"], ["distributed/rpc"], [INPUT, OTHER, TOP]),
        ([TOP, "distributed/rpc"], [], [RPC_INPUT, RPC, TOP]),
    ],
)
def test_only_files_whose_names_are_needed_are_imported(include, exclude, files):
    assert choose(include, exclude)[0] == files


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("distributed/fspd", "distributed/fsdp"),
        ("test/distributed/fsdp/test_fsdp_inputs.py", INPUT),
        ("TestInptu", "TestInput"),
        ("TestInput.test_dcit", "TestInput.test_dict"),
        ("testinput", "TestInput"),
        (f"{INPUT}::TestInptu", "TestInput"),
        (f"{INPUT}::TestInput::test_tupel", "TestInput.test_tuple"),
        ("test_cal", "TestRpc.test_call"),
    ],
)
def test_a_mistyped_pattern_is_named_with_what_comes_nearest(pattern, near):
    for include, exclude in (([pattern], []), ([TOP, pattern], []), ([], [pattern])):
        with pytest.raises(SelectionError) as raised:
            choose(include, exclude)
        message, _, nearest = str(raised.value).partition("; nearest: ")
        assert repr(pattern) in message
        assert near in nearest.split(", ")


@pytest.mark.parametrize("pattern", ["", " ", "zzzzqqqq", f"{INPUT}::", f"{INPUT}::a::b::c", "fsdp/", "a::b/c"])
def test_a_pattern_that_resembles_nothing_is_an_error(pattern):
    with pytest.raises(SelectionError, match=re.escape(repr(pattern))):
        choose([pattern])


def test_a_path_that_does_not_exist_is_an_error_before_anything_is_imported():
    for pattern in ("distributed/fspd", "test_nothing.py", "nowhere/test_rpc.TestRpc", "test_nothing.py::TestRpc"):
        with pytest.raises(SelectionError):
            select_files(FILES, [pattern], ())


def test_excluding_names_of_files_that_are_not_run_is_no_error():
    assert choose([INPUT], [f"{RPC}::TestRpc"])[1] == ids(0, 1, 2)
    assert choose([INPUT], ["distributed/rpc"])[1] == ids(0, 1, 2)
    with pytest.raises(SelectionError, match="TestRpc"):
        choose([INPUT], ["TestRpc"])


def test_including_names_of_excluded_files_selects_nothing_quietly():
    assert choose([f"{RPC}::TestRpc", TOP], ["distributed"])[1] == ids(6)


def test_a_dot_in_a_folder_is_no_separator_of_folders():
    tests = [TestName(f"{folder}/test_m.py", "TestA", "test_1") for folder in ("v1", "v1.2", "v1/2", "a/v1.2")]
    for number, pattern in enumerate(("v1/test_m.py", "v1.2", "v1/2", "a/v1.2")):
        assert choose([pattern], (), tests)[1] == [tests[number].id]
    assert choose(["v1.2/test_m.TestA.test_1"], (), tests)[1] == [tests[1].id]
    assert choose(["v1"], (), tests)[1] == [tests[0].id, tests[2].id]


def test_a_suffix_or_a_slash_says_whether_a_file_or_a_folder_is_meant():
    tests = [TestName(file, "TestA", "test_1") for file in ("test_a/test_b.py", "x/test_a.py", "test_a.py")]
    for pattern, number in (("test_a.py", 2), ("test_a", 2), ("test_a/", 0)):
        assert choose([pattern], (), tests)[1] == [tests[number].id]
    for pattern, number in (("test_a.py", 1), ("test_a", 0), ("test_a/", 0)):
        assert choose([pattern], (), tests[:2])[1] == [tests[number].id]


# Files, folders, classes and tests that share names.
SAME = st.sampled_from(["test_a", "test_b"])
TANGLES = st.sets(
    st.builds(
        lambda folders, stem, cls, method: TestName("/".join([*folders, f"{stem}.py"]), cls, method),
        st.lists(st.sampled_from(["test_a", "test_b", "test"]), max_size=3),
        SAME,
        SAME,
        SAME,
    ),
    min_size=1,
    max_size=12,
).map(lambda tests: sorted(tests, key=lambda test: test.id))


@given(TANGLES)
def test_an_id_or_path_selects_exactly_its_tests_and_imports_only_its_file(tests):
    for test in tests:
        assert choose([test.id], (), tests) == ([test.file], [test.id])
        of_file = [each.id for each in tests if each.file == test.file]
        assert choose([test.file], (), tests) == ([test.file], of_file)


# --- -k: checked against Python's evaluation of the same expression ---------------------------------------------------

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
def test_a_word_is_a_part_of_the_name_or_a_glob(word, fits):
    assert keyword_filter([word])(TEST) is fits


@given(EXPRESSIONS)
def test_expressions_mean_what_they_mean_in_python(text):
    assert keyword_filter([text])(TEST) == eval(text, {}, {word: word.lower() in TEST.id.lower() for word in WORDS})


@pytest.mark.parametrize(
    "text",
    ["a and", "not", "and a", "a or or b", "(a or b", "a)", "a b", "a (b)", "()", "a AND b", "lambda a", "(" * 999],
)
def test_an_incomplete_expression_is_refused(text):
    with pytest.raises(SelectionError) as raised:
        keyword_filter([text])
    assert str(raised.value) == f"got -k {text!r}, expected names joined by 'and', 'or', 'not' and parentheses"
