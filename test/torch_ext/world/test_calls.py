"""The value that a call returned shows whether its body ran; pure, like the words for terminals."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from torch_ext.world.verdict import check_ran
from torch_ext.world.wording import printable


async def coroutine() -> None:
    raise AssertionError("it ran")


def generator() -> Iterator[None]:
    raise AssertionError("it ran")
    yield


async def async_generator() -> AsyncIterator[None]:
    raise AssertionError("it ran")
    yield


class Awaitable:
    def __await__(self) -> Iterator[None]:
        raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "a coroutine"),
        (generator, "a generator"),
        (async_generator, "an asynchronous generator"),
        (Awaitable, r"an awaitable \(Awaitable\)"),
    ],
)
def test_body_that_has_not_run_is_refused_and_closed(function: Callable[[], Any], kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "was never awaited"
        with pytest.raises(TypeError, match=rf"^test_a\(\) returned {kind}, so its body has not run\. Write it as"):
            check_ran(function(), "test_a")
        gc.collect()


@pytest.mark.parametrize("returned", [None, True, 3, [], [1].__iter__(), "text", object()])
def test_other_return_values_are_accepted(returned: object) -> None:
    check_ran(returned, "test_a")


def test_no_control_character_is_printed_raw() -> None:
    shown = printable("".join(map(chr, range(0x110)))) + printable("\u202e\u2066\x1b]0;title\x07")
    assert {character for character in shown if not character.isprintable()} == {"\t", "\n", "\xa0", "\xad"}
    assert printable("\x1b[2J\0\r\x9b") == r"\x1b[2J\x00\x0d\x9b"
    assert printable("\t\u202e") == "\t\\u202e"
    text = "plain\ttext\nüñí 漢字 🙂 \\x1b"
    assert printable(text) == text, "it stays, and nothing is spelt out twice"
