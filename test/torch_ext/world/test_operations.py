"""A rank reads its own flight record."""

import json

import pytest
from torch._C import _distributed_c10d

from torch_ext.compat import c10d
from torch_ext.world import operations


def test_flight_record_is_not_touched_before_a_group_exists(monkeypatch):
    """Torch's recorder takes its size from the environment at the first look, and forked ranks would inherit it."""
    monkeypatch.setattr(c10d, "flight_record", lambda: pytest.fail("the recorder was read"))
    monkeypatch.setattr(operations, "_has_destroyed", False)
    assert json.loads(operations.own_record())["entries"] == []


def test_flight_record_is_read_with_the_function_of_the_day(monkeypatch):
    """A rank may look at its record before it loads the simulated accelerator, which replaces the function."""
    c10d.flight_record()
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda *_: '{"entries": [{"record_id": 7}]}')
    assert c10d.flight_record() == [{"record_id": 7}]
