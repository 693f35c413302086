"""Waits are found and deleted as the table needs it, and a few that are needed are reported once deleted."""

from __future__ import annotations

import pytest

from test.torch_ext.suite_waits.measure import Verdict, all_sites, try_without
from test.torch_ext.suite_waits.sites import MODULES, delete
from test.torch_ext.suite_waits.table import render


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
    first, second, third, *others = chosen = all_sites()[:4]
    verdicts = {
        first.id: Verdict("load-bearing", "a:TestA.test_b", "race: x writes what y reads", 1),
        second.id: Verdict("redundant", tries=2),
        **{site.id: Verdict("not reached") for site in (third, *others)},
    }
    text = render(chosen, verdicts, "2.13", 6)
    assert "| FSDP1 | 4 | 1 | 1 | 1 | 2 |" in text
    assert "| load-bearing | x writes what y reads; `TestA.test_b` |" in text
    assert "| redundant | silent in 2 tests |" in text


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


def test_deleting_a_needed_wait_is_reported_as_a_race() -> None:
    wanted = {
        name: (f"test.distributed.{module}:TestSteps.{METHODS[module]}", (_site(function, text),))
        for name, (function, text, module) in NEEDED.items()
    }
    intact = [(test, ()) for test in sorted({test for test, _ in wanted.values()})]
    endings = try_without([*wanted.values(), *intact])
    assert {name: bool(endings[each].races) for name, each in wanted.items()} == dict.fromkeys(wanted, True)
    assert [endings[each].status for each in intact] == ["passed"] * 2
