"""Waits are found and deleted as the table needs it, and a few that are needed are reported once deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import pytest
import torch

from test.torch_ext.suite_waits.covers import Cover, Ending, find_covers, races_of
from test.torch_ext.suite_waits.measure import PAGE, SUITES, Verdict, all_sites, try_without
from test.torch_ext.suite_waits.sites import MODULES, delete
from test.torch_ext.suite_waits.table import CoveredRow, covered_rows, release_of, render


def _site(function: str, text: str) -> str:
    (found,) = [site.id for site in all_sites() if site.id.split(":")[1] == function and text in site.text]
    return found


def test_every_family_has_waits() -> None:
    families = [site.family for site in all_sites()]
    assert {name: families.count(name) >= 5 for name in MODULES} == dict.fromkeys(MODULES, True)
    assert len({site.id for site in all_sites()}) == len(families)


@pytest.mark.parametrize("site", ["torch.distributed.utils:_recursive_to:1", "torch.distributed.utils:_recursive_to:x"])
def test_a_site_that_is_none_is_refused(site: str) -> None:
    with pytest.raises(ValueError, match=r"has no wait in one of the lines \[1\]|invalid literal"):
        delete(site)


def test_the_table_says_what_was_measured() -> None:
    first, second, third, fourth, *others = chosen = all_sites()[:5]
    verdicts = {
        first.id: Verdict("load-bearing", "a:TestA.test_b", "race: x writes what y reads", 1),
        second.id: Verdict("redundant", tries=2, cover=Cover((first.id,), "a:TestA.test_b", "v writes what w reads")),
        third.id: Verdict("redundant", tries=1, cover=Cover()),
        **{site.id: Verdict("not reached") for site in (fourth, *others)},
    }
    text = render(chosen, verdicts, "2.13", 6)
    assert "| FSDP1 | 5 | 1 | 1 | 2 | 1 | 2 |" in text
    assert "| load-bearing | x writes what y reads; `TestA.test_b` |" in text
    function = first.function.rpartition(".")[2]
    cover = f"covered by `_runtime_utils.py:{first.line}` `{function}`: without them, v writes what w reads"
    assert f"| redundant | silent in 2 tests; {cover}; `TestA.test_b` |" in text
    assert "| redundant | silent in 1 test; nothing that runs depends on it |" in text
    assert release_of(text) == "2.13"
    assert covered_rows(text, chosen) == [CoveredRow(second.id, (first.id,), "v writes what w reads", "TestA.test_b")]


# What each race of an imagined test needs: all of these waits deleted.
RACES = {
    ("a", "b"): "one of a and b is needed",
    ("c", "d", "e"): "one of c, d and e is needed",
    ("g",): "g is needed",
    ("f", "g"): "f is hidden behind g",
}
NAMES = {name: f"module:function:{number}" for number, name in enumerate("abcdefghijklmn")}


def _imagine(
    runs: list[int], wanted: Iterable[tuple[str, tuple[str, ...]]]
) -> dict[tuple[str, tuple[str, ...]], Ending]:
    runs.append(len(wanted := list(wanted)))
    endings = {}
    for test, deleted in wanted:
        found = [race for waits, race in RACES.items() if {NAMES[wait] for wait in waits} <= {*deleted}]
        text = "all ranks failed with RaceError\n"
        text += "".join(f"race {number}: {race} (2 times)\n" for number, race in enumerate(found, 1))
        if test == "fragile" and len(deleted) > 2:
            text = "all ranks failed with ZeroDivisionError\n"
        endings[test, deleted] = Ending("failed" if found else "passed", 0.1, text)
    return endings


@pytest.mark.parametrize(
    ("wait", "others"), {"a": "b", "b": "a", "c": "de", "e": "cd", "f": "g", "h": ""}.items(), ids=lambda each: each
)
def test_what_covers_a_wait_is_found(wait: str, others: str) -> None:
    runs: list[int] = []
    redundant = {NAMES[name]: ["test"] for name in "abcdefh"}
    covers = find_covers(redundant, {"test": {*NAMES.values()}}, partial(_imagine, runs), lambda _: None)
    found = covers[NAMES[wait]]
    assert found.others == tuple(NAMES[other] for other in others)
    assert found.race == next((race for waits, race in RACES.items() if {*waits} == {wait, *others}), "")
    assert sum(runs) < 200


def test_of_a_test_that_needs_some_wait_to_run_single_covers_are_found() -> None:
    redundant = {NAMES[name]: ["fragile"] for name in "abcdefh"}
    covers = find_covers(redundant, {"fragile": {*NAMES.values()}}, partial(_imagine, []), lambda _: None)
    found = {site: cover.others for site, cover in covers.items()}
    assert found == {NAMES[wait]: (NAMES[other],) for wait, other in {"a": "b", "b": "a", "f": "g"}.items()}


def test_equal_races_have_equal_keys() -> None:
    text = "race {}: all_gather number {} writes what aten::mul reads\n  earlier\n      {} in step\n  later\n"
    first, second, other = (
        races_of(Ending("failed", 1, text.format(*each)))
        for each in ((1, 2, "a.py:1"), (2, 7, "a.py:1"), (1, 2, "a.py:2"))
    )
    assert list(first) == list(second) != list(other)
    assert list(first.values()) == ["all_gather number 2 writes what aten::mul reads"]


NEEDED = {
    "FSDP1's backward waits for its unshard": ("_pre_backward_hook", "wait_stream", "fsdp.test_fsdp_anatomy"),
    "FSDP1's reduction waits for backward": ("_post_backward_hook", "wait_stream", "fsdp.test_fsdp_anatomy"),
    "FSDP1's memory waits for its users": (
        "FlatParamHandle._free_unsharded_flat_param", "record_stream", "fsdp.test_fsdp_anatomy",
    ),
    "FSDP2's reduction waits for backward": (
        "foreach_reduce", "reduce_scatter_stream.wait_stream(current", "_composable.fsdp.test_fully_shard_anatomy",
    ),
    "FSDP2's copy-out waits for the gather": (
        "foreach_all_gather_copy_out", "wait_event", "_composable.fsdp.test_fully_shard_anatomy",
    ),
}  # fmt: skip
METHODS = {
    "fsdp.test_fsdp_anatomy": "test_full_shard",
    "_composable.fsdp.test_fully_shard_anatomy": "test_reshard_after_forward",
}


# Tests without a wait of which another one does the work.
COVERED = {
    "FSDP2's gather waits on one of its streams for the other": (
        "TestFSDP2.test_event_after_the_optimizer",
        ("FSDPParamGroup._wait_all_gather_streams_on_event", "all_gather_stream.wait_event"),
        ("FSDPParamGroup._wait_all_gather_streams_on_event", "copy_in_stream.wait_event"),
    ),
    "DTensor waits when it redistributes, or when the result is used": (
        "TestDTensor.test_redistribution",
        ("redistribute_local_tensor", "wait"),
        ("AsyncCollectiveTensor.trigger_wait", "wait"),
    ),
}

Endings = Mapping[tuple[str, tuple[str, ...]], Ending]
Runs = dict[str, tuple[str, tuple[str, ...]]]


def _needed() -> Runs:
    return {
        name: (f"test.distributed.{module}:TestSteps.{METHODS[module]}", (_site(function, text),))
        for name, (function, text, module) in NEEDED.items()
    }


def _runs_of(test: str, site: str, others: tuple[str, ...]) -> Runs:
    """A test without one wait, without those that cover it, and without all of them."""
    return {"it": (test, (site,)), "others": (test, others), "all": (test, (site, *others))}


def _covered() -> dict[str, Runs]:
    return {
        name: _runs_of(_named(test)[0], _site(*site), (_site(*other),)) for name, (test, site, other) in COVERED.items()
    }


def _added(endings: Endings, runs: Runs) -> list[str]:
    """The races that are reported without all waits of :func:`_runs_of`, and not without the others alone."""
    before = races_of(endings[runs["others"]])
    return [heading for key, heading in races_of(endings[runs["all"]]).items() if key not in before]


def _named(name: str) -> list[str]:
    """The tests of that class and method, with their modules."""
    cls, _, method = name.partition(".")
    return [f"{suite}.{method}" for suite in SUITES if suite.endswith(f":{cls}")]


@pytest.fixture(scope="module")
def endings() -> Endings:
    """Of all tests with waits deleted, in one run."""
    wanted = [*_needed().values(), *(each for runs in _covered().values() for each in runs.values())]
    return try_without([*wanted, *((test, ()) for test in sorted({test for test, _ in wanted}))])


def test_deleting_a_needed_wait_is_reported_as_a_race(endings: Endings) -> None:
    assert {name: bool(endings[each].races) for name, each in _needed().items()} == dict.fromkeys(NEEDED, True)
    assert {test: ending.status for (test, deleted), ending in endings.items() if not deleted} == dict.fromkeys(
        {test for test, _ in endings}, "passed"
    )


def test_deleting_a_covered_wait_is_reported_once_what_covers_it_is_deleted_too(endings: Endings) -> None:
    found = {name: (endings[runs["it"]].status, bool(_added(endings, runs))) for name, runs in _covered().items()}
    assert found == dict.fromkeys(COVERED, ("passed", True))


def test_each_row_of_the_page_names_what_covers_a_wait(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("deletes the waits of each row that names others: --long does it")
    page = PAGE.read_text(encoding="utf-8")
    if release_of(page) != torch.__version__:
        pytest.skip(f"docs/waits.md was measured with torch {release_of(page)}, and lines move between releases")
    rows = covered_rows(page, all_sites())
    assert len(rows) == page.count("; covered by "), "a row is written as table.py does not read it"
    runs = {(row, test): _runs_of(test, row.site, row.others) for row in rows for test in _named(row.test)}
    found = try_without([each for three in runs.values() for each in three.values()])
    shown = {
        row
        for (row, test), three in runs.items()
        if all(each in found for each in three.values())
        and found[three["it"]].status == "passed"
        and row.race in _added(found, three)
    }
    assert [row for row in rows if row not in shown] == []
