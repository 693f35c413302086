"""Pools of memory, as CUDACachingAllocator.cpp has them: what they keep apart, who allocates there, what comes back."""

import contextlib
import gc
import os
import threading

import pytest
import torch

SIM = torch.get_device_module("sim")
DEVICE = torch.device("sim", 0)
SEGMENT = 2 << 20  # of small requests


def _make(nbytes=4096):
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    SIM.empty_cache()


@contextlib.contextmanager
def _limit(nbytes):
    before = SIM.mem_get_info(DEVICE)[1]
    SIM.set_memory_limit(SIM.memory_reserved(DEVICE) + nbytes, DEVICE)
    try:
        yield
    finally:
        SIM.set_memory_limit(before, DEVICE)


def test_a_pool_serves_its_users_alone_and_returns_memory_with_its_deletion():
    reserved, pool = SIM.memory_reserved(DEVICE), SIM.MemPool()
    assert (pool.use_count(), pool.device, pool.id[0]) == (1, 0, 0) and pool.id != SIM.MemPool().id
    with SIM.use_mem_pool(pool):
        assert pool.use_count() == 2
        kept, freed = _make(), _make().add(1)  # of a factory, and of a kernel
    assert pool.use_count() == 1
    (segment,) = pool.snapshot()
    assert (segment["segment_pool_id"], segment["total_size"]) == (pool.id, SEGMENT)
    place = freed.data_ptr()
    del freed
    SIM.empty_cache()
    outside = _make()
    assert segment["address"] == pool.snapshot()[0]["address"] and outside.data_ptr() != place
    with SIM.use_mem_pool(pool, "sim:0"):
        assert {_make().data_ptr() for _ in range(3)} <= {place, place - 4096, place + 4096}
    name = pool.id
    del pool
    assert len(SIM.memory_snapshot(name)) == 1  # of `kept`
    del kept, outside
    SIM.empty_cache()
    assert SIM.memory_snapshot(name) == [] and SIM.memory_reserved(DEVICE) == reserved


def test_deletion_returns_what_is_idle_at_once():
    pool, other = SIM.MemPool(), _make()
    with SIM.use_mem_pool(pool):
        _make()
    del other
    name, reserved = pool.id, SIM.memory_reserved(DEVICE)
    del pool
    assert SIM.memory_snapshot(name) == [] and SIM.memory_reserved(DEVICE) == reserved - SEGMENT  # not what `other` had


@pytest.mark.processes
def test_a_forked_child_may_delete_a_pool():
    pool = SIM.MemPool()
    if (child := os.fork()) == 0:
        del pool  # an error here would end the process
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and pool.use_count() == 1


@pytest.mark.parametrize("whole", [False, True])
def test_segments_stay_whole_on_request(whole):
    pool = SIM.MemPool(no_split=whole)
    with SIM.use_mem_pool(pool):
        _held = [_make() for _ in range(3)]
    assert len(pool.snapshot()) == (3 if whole else 1)


@pytest.mark.parametrize("lends", [False, True])
def test_idle_memory_is_lent_on_request_before_there_is_none(lends):
    pool = SIM.MemPool(use_on_oom=lends)
    with SIM.use_mem_pool(pool):
        place = _make(SEGMENT).data_ptr()
    with _limit(0):
        with SIM.use_mem_pool(SIM.MemPool()), pytest.raises(torch.OutOfMemoryError):
            _make(SEGMENT)  # pools lend nothing to one another
        if lends:
            lent = _make(SEGMENT)
            assert lent.data_ptr() == place
        else:
            with pytest.raises(torch.OutOfMemoryError):
                _make(SEGMENT)


def _pool_of(tensor):
    """Return the id of the pool whose segment has a tensor."""
    starts = {each["address"]: each for each in SIM.memory_snapshot() if each["address"] <= tensor.data_ptr()}
    return starts[max(starts)]["segment_pool_id"]


def test_the_innermost_pool_serves_its_thread_and_device():
    outer, inner = SIM.MemPool(), SIM.MemPool()
    made = []
    with SIM.use_mem_pool(outer):
        with pytest.raises(ZeroDivisionError), SIM.use_mem_pool(inner):
            made.append(_make())
            raise ZeroDivisionError
        made.append(_make())
        thread = threading.Thread(target=lambda: made.append(_make()))
        thread.start()
        thread.join()
        made.append(torch.empty(1, device="sim:1"))
        with pytest.raises(RuntimeError, match="this thread allocates in the pool already"), SIM.use_mem_pool(outer):
            pass
        made.append(_make())
    assert [_pool_of(each) for each in made] == [inner.id, outer.id, (0, 0), (0, 0), outer.id]
    assert outer.use_count() == inner.use_count() == 1


def test_captures_allocate_in_a_pool_that_they_are_given_or_that_is_used_within():
    pool, within, around = SIM.MemPool(), SIM.MemPool(), SIM.MemPool()
    graph = torch.accelerator.Graph(pool=pool.id)
    with SIM.use_mem_pool(around), SIM.stream(SIM.Stream(DEVICE)):
        with graph:
            captured = _make().fill_(1)
            with SIM.use_mem_pool(within):
                special = _make()
    assert [_pool_of(each) for each in (captured, special)] == [pool.id, within.id]
    name = pool.id
    assert pool.use_count() == 2
    del pool, captured
    SIM.empty_cache()
    assert len(SIM.memory_snapshot(name)) == 1  # the graph writes to it
    del graph
    gc.collect()
    SIM.empty_cache()
    assert SIM.memory_snapshot(name) == []
