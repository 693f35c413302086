"""Frames that reports leave out, and characters that they escape."""

import re

import pytest

from torch_ext.world import wording

MINE = "/home/me/test_x.py"
TEST_FRAME = f'  File "{MINE}", line 5 in test_hang\n'
HEAD = "Current thread 0x00007e (most recent call first):\n"


@pytest.fixture
def hide(monkeypatch):
    def hide(file, *functions):
        monkeypatch.setattr(wording, "_HIDDEN", (*wording._HIDDEN, wording.HiddenFrames(file, functions)))

    return hide


def test_stacks_lose_the_world_and_keep_the_test():
    listener = (
        'Thread 0x00007f (most recent call first):\n  File "/x/torch_ext/world/rank.py", line 9 in _listen\n'
        '  File "/usr/lib/threading.py", line 1 in run\n\n'
    )
    outwards = '  File "/x/torch_ext/world/rank.py", line 8 in _run_task\n  File "/usr/lib/process.py", line 3 in run\n'
    modules = "Extension modules: numpy._core (total: 1)\n"
    assert wording.trim_stacks(listener + HEAD + TEST_FRAME + outwards + modules) == HEAD + TEST_FRAME


def test_a_thread_of_the_world_that_died_is_shown_and_named():
    frames = f'  File "{wording.__file__}", line 5 in f\n  File "/x/torch_ext/world/rank.py", line 9 in _listen\n'
    current, other = HEAD + frames + "\n", HEAD.replace("Current t", "T") + TEST_FRAME
    died = f"{wording.FATAL} Segmentation fault\n\n{other}\n{current}"
    assert wording.trim_stacks(died) == died
    assert wording.place_of_death(died) == "in a thread of torch_ext, which is a fault of torch_ext"
    assert wording.place_of_death(f"{wording.FATAL} Segmentation fault\n\n{other}\n{HEAD}") == "at test_x.py:5"
    assert wording.trim_stacks(current + other) == other


def test_a_function_of_the_world_in_which_a_rank_hangs_is_shown():
    stacks = HEAD + '  File "/x/torch_ext/world/rank.py", line 9 in submit\n'
    assert wording.trim_stacks(stacks) == stacks


def test_a_layer_hides_its_functions_in_stacks_and_its_files_in_tracebacks(hide):
    stacks = HEAD + TEST_FRAME + '  File "/x/layer.py", line 1 in call\n  File "/x/layer.py", line 2 in other\n'
    assert wording.trim_stacks(stacks) == stacks
    hide(r"/layer\.py")
    assert wording.trim_stacks(stacks) == stacks
    hide(r"/layer\.py", "call")
    assert wording.trim_stacks(stacks) == HEAD + TEST_FRAME + '  File "/x/layer.py", line 2 in other\n'


def raises():
    raise ValueError("no\nsecond line")


def calls():
    raises()


def error_of(function):
    with pytest.raises(ValueError) as caught:
        function()
    return caught.value


def test_a_traceback_loses_the_functions_that_are_named(hide):
    hide(re.escape(__file__), "calls")
    reason, trace = wording.read_error(error_of(calls))
    assert reason == "ValueError: no"
    assert "in raises" in trace and "in calls" not in trace and "in error_of" in trace


def test_a_traceback_of_hidden_frames_alone_is_shown_whole(hide):
    hide(re.escape(__file__))
    _, trace = wording.read_error(error_of(calls))
    assert "in raises" in trace and "in calls" in trace


def test_causes_are_trimmed_too(hide):
    hide(re.escape(__file__), "calls")
    outer = RuntimeError("outer")
    outer.__cause__ = error_of(calls)
    assert "in calls" not in wording.read_error(outer)[1]
    assert "ValueError: no" in wording.read_error(outer)[1]


def test_no_control_character_is_printed_raw():
    shown = wording.printable("".join(map(chr, range(0x110)))) + wording.printable("\u202e\u2066\x1b]0;title\x07")
    assert {character for character in shown if not character.isprintable()} == {"\t", "\n", "\xa0", "\xad"}
    assert wording.printable("\x1b[2J\0\r\x9b") == r"\x1b[2J\x00\x0d\x9b"
    assert wording.printable("\t\u202e") == "\t\\u202e"
    text = "plain\ttext\nüñí 漢字 🙂 \\x1b"
    assert wording.printable(text) == text, "it stays, and nothing is spelt out twice"
