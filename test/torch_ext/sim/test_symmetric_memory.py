"""Symmetric memory: allocation, rendezvous, buffers, signals, operators, and what happens to a rank whose peer errs."""

import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from test.torch_ext.faults.test_laboratory import report_of
from test.torch_ext.sim import ranks
from torch_ext.sim import _native, races
from torch_ext.sim._name import NAME

SIM = torch.get_device_module(NAME)
LINE = re.compile(rf"{re.escape(__file__)}:\d+")


def _shared(numel=64, dtype=torch.float32, group=None):
    """Return a symmetric tensor of this rank, and its handle."""
    tensor = symm_mem.empty(numel, dtype=dtype, device=torch.device(NAME, SIM.current_device()))
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def _pad_is_zero(handle):
    return not handle.get_signal_pad(handle.rank, dtype=torch.int32).any()


@pytest.mark.parametrize("world", [2, 3])
def test_signals_order_data_and_leave_pads_zero(world):
    ranks.run(world, _signals)


def _signals(rank, world_size):
    tensor, handle = _shared()
    assert (handle.rank, handle.world_size, handle.buffer_size) == (rank, world_size, 256)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for turn in range(5):
        handle.get_buffer(after, (64,), torch.float32).fill_(10 * rank + turn)
        handle.put_signal(after, channel=turn)
        handle.wait_signal(before, channel=turn)
        assert tensor.eq(10 * before + turn).all()
        handle.barrier()
    # Barriers of two streams do not meet on different channels.
    side = SIM.Stream()
    for _ in range(20):
        handle.barrier(channel=1)
        with SIM.stream(side):
            handle.barrier(channel=2)
    SIM.synchronize()
    dist.barrier()
    assert _pad_is_zero(handle)
    dist.barrier()
    half = handle.get_buffer(after, (4, 8), torch.float32, storage_offset=32)
    assert half.shape == (4, 8) and half.device == tensor.device
    handle.barrier()


@ranks.world_of(2)
def test_signals_go_on_while_the_host_has_no_call_of_the_device(rank, world_size):
    """As on a GPU: rank 1 takes the barrier's signal late, so that rank 0's next one finds a full slot."""
    _, handle = _shared()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["rank 1 is in its barrier"])
        handle.barrier()
        handle.put_signal(1)
        store.set("rank 0 has put", "")
        store.wait(["rank 1 has the signal"])
    else:
        handle.barrier()
        store.set("rank 1 is in its barrier", "")
        store.wait(["rank 0 has put"])
        handle.wait_signal(0)
        SIM.synchronize()
        store.set("rank 1 has the signal", "")


@ranks.world_of(2)
def test_signal_of_a_late_rank_blocks_neither_the_host_nor_another_stream(rank, world_size):
    tensor, handle = _shared()
    if rank == 0:
        side = SIM.Stream()
        handle.wait_signal(1)
        assert not SIM.current_stream().query()
        with SIM.stream(side):
            torch.ones(3, device=NAME).sum().item()
        handle.put_signal(1, channel=1)  # after the wait, so the host waits here at the latest
        assert tensor.eq(5).all()
    else:
        time.sleep(0.1)
        handle.get_buffer(0, (64,), torch.float32).fill_(5)
        handle.put_signal(0)
        handle.wait_signal(0, channel=1)
        SIM.synchronize()


@ranks.world_of(2)
def test_bounds_are_checked_in_words_of_cuda(rank, world_size):
    tensor, handle = _shared()
    peer = 1 - rank
    pad = handle.signal_pad_size
    for call, words in (
        (
            lambda: handle.get_buffer(peer, (65,), torch.float32),
            r"get_buffer: .* size \(260 bytes\) exceeds",
        ),
        (lambda: handle.get_buffer(peer, (1,), torch.float32, 64), r"get_buffer: the requested size \(260 bytes\)"),
        (lambda: handle.get_buffer(2, (1,), torch.float32), "peer rank: 2|rank"),
        (lambda: handle.get_signal_pad(peer, (pad // 4 + 1,)), r"get_signal_pad: the requested size .* exceeds"),
        (lambda: handle.barrier(channel=pad // 8), rf"maximum supported channel .* is {pad // 8 - 1} \(got {pad // 8}"),
        (lambda: handle.put_signal(peer, channel=-1), "must be greater than or equal to 0"),
        (lambda: handle.wait_signal(2), "less than the world size"),
        (lambda: torch.ops.symm_mem.multimem_all_reduce_(tensor, "sum", "0"), "multimem_all_reduce_ needs NVLink"),
        (lambda: symm_mem.empty(2**40, device=tensor.device), "out of memory"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match=words):
            call()
    handle.barrier(channel=pad // 8 - 1)
    SIM.synchronize()


@ranks.world_of(2)
def test_time_limit_of_each_signal_names_ranks_channel_and_line(rank, world_size):
    _, handle = _shared()
    if rank == 0:
        handle.put_signal(1, channel=2)
        for call, what in (
            (lambda: handle.wait_signal(1, timeout_ms=50), "wait_signal: rank 0 failed to receive signal from"),
            (lambda: handle.put_signal(1, channel=2, timeout_ms=50), "put_signal: rank 0 failed to send signal to"),
            (lambda: handle.barrier(channel=1, timeout_ms=50), "barrier: rank 0 failed to receive signal from"),
        ):
            call()
            words = rf"unspecified launch failure\n.*{what} rank 1 on channel \d after 50"
            with pytest.raises(torch.AcceleratorError, match=words) as error:
                SIM.synchronize()
            assert LINE.search(str(error.value))
    else:
        time.sleep(0.5)
    ranks.leave()


@pytest.mark.parametrize("call", ["wait_signal", "barrier"])
def test_waiter_learns_that_its_peer_was_killed(call):
    ranks.run(2, _killed, call, killed=1)


def _killed(rank, world_size, call):
    tensor, handle = _shared()
    if rank == 1:
        tensor.fill_(7)
        handle.put_signal(0, channel=1)
        SIM.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    handle.wait_signal(1, channel=1)
    handle.wait_signal(1) if call == "wait_signal" else handle.barrier()
    with pytest.raises(torch.AcceleratorError, match=r"from rank 1 on channel 0: rank 1 \(process \d+\) has ended"):
        SIM.synchronize()
    assert handle.get_buffer(1, (64,), torch.float32).eq(7).all()  # its memory lives as long as ours
    ranks.leave()


def test_killed_ranks_leave_nothing_behind():
    before = set(Path("/dev/shm").iterdir())
    ranks.run(2, _killed, "barrier", killed=1)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "symm" in path.name]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("peer", "cause"),
    [
        ("hangs", "rank 1 never put a signal on channel 3 for rank 0, which waited in wait_signal (test_symm"),
        ("ends", "rank 1 destroyed the process group at ranks.py:"),
    ],
)
def test_report_blames_the_rank_that_puts_no_signal(peer, cause, tmp_path):
    passed, report = report_of(globals()[f"_puts_on_another_channel_and_{peer}"], "", tmp_path)
    assert not passed and report.startswith(cause), report


def _puts_on_another_channel_and_ends(rank, world_size):
    _, handle = _shared()
    if rank == 0:
        handle.wait_signal(1, channel=3)
        SIM.synchronize()
    handle.put_signal(0, channel=2)


def _puts_on_another_channel_and_hangs(rank, world_size):
    _puts_on_another_channel_and_ends(rank, world_size)
    threading.Event().wait()


@ranks.world_of(2)
def test_tensors_of_a_pool_are_symmetric_memory(rank, world_size):
    device = torch.device(NAME, SIM.current_device())
    pool, x = SIM.MemPool(symm_mem.get_mempool_allocator(device), no_split=True), torch.eye(8, device=device)
    with SIM.use_mem_pool(pool):
        shared, product = torch.arange(4.0, device=device), x @ x.add(rank)
    group = dist.group.WORLD.group_name
    for tensor in shared, product:
        assert tensor.device == device and symm_mem.rendezvous(tensor, group).world_size == 2
        total = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group)
        assert torch.equal(total, shared * 2 if tensor is shared else torch.eye(8, device=device) * 2 + 1)
    assert symm_mem.rendezvous(x, group) is None
    dist.barrier()


@pytest.mark.parametrize("why", ["late", "killed", "left"])
def test_rendezvous_without_a_rank_names_it(why):
    timeout = ranks.SHORT if why == "late" else ranks.GROUP_TIMEOUT * 4  # past the test's deadline
    ranks.run(3, _absent, why, killed=1 if why == "killed" else None, timeout=timeout)


def _absent(rank, world_size, why):
    words = {
        "late": "rank 1 did not join within 1000 ms",
        "killed": r"rank 1 \(process \d+\) has ended and takes no part in",
        "left": "rank 1 has destroyed the group and takes no part in",
    }
    if why == "left" and rank == 2:
        # Rank 0 comes to the operation too and ends by its error: rank 1 is to blame.
        ranks.wait_for_end_of(int(ranks.store().get("process of 0")))
    if rank != 1:
        with pytest.raises(dist.DistBackendError, match=rf"on rank {rank}: {words[why]} the rendezvous") as error:
            _shared()
        assert LINE.search(str(error.value))
        ranks.store().set(f"told {rank}", "") if why == "late" else None
    elif why == "late":
        ranks.store().wait(["told 0", "told 2"])
    elif why == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif why == "left":
        dist.destroy_process_group()
    ranks.leave()


@ranks.world_of(2)
def test_graph_signals_in_each_replay_and_its_capture_touches_no_memory_of_peers(rank, world_size):
    tensor, handle = _shared()
    theirs = handle.get_buffer(1 - rank, (64,), torch.float32)
    source, out = torch.full((32,), 5.0, device=NAME), torch.zeros(32, device=NAME)
    graph, store = torch.accelerator.Graph(), ranks.store()
    if rank == 1:
        store.wait(["rank 0 has captured writes"])
        assert not tensor.any() and not theirs.any()
        tensor.fill_(8)
        theirs.fill_(7)
        SIM.synchronize()
        store.set("rank 1 has written", "")
    with SIM.stream(SIM.Stream()), graph:
        theirs[:32].copy_(source)
        tensor[32:].copy_(source)
        if rank == 0:
            store.set("rank 0 has captured writes", "")
            store.wait(["rank 1 has written"])
        handle.put_signal(1 - rank)
        handle.wait_signal(1 - rank)
        torch.add(tensor[:32], theirs[32:], out=out)
        handle.barrier(channel=1)
    assert tensor.eq(7 + rank).all()
    dist.barrier()
    races.start()
    handle.barrier()
    for turn in range(3):
        source.fill_(2 * turn + rank)
        graph.replay()
        assert out.eq(2 * (2 * turn + 1 - rank)).all()
    SIM.synchronize()
    found = races.stop()
    assert not found, races.render(found)
    dist.barrier()


@ranks.world_of(2)
def test_rendezvous_refuses_memory_that_differs(rank, world_size):
    with pytest.raises(RuntimeError, match=r"rank 0 has a buffer of 256 bytes .*, rank 1 has 260"):
        _shared(64 + rank)
    SIM.set_device(0)
    with pytest.raises(RuntimeError, match="detected allocations from overlapping devices"):
        _shared()
    SIM.set_device(rank)
    assert _SymmetricMemory.rendezvous(torch.ones(3, device=NAME), "0") is None
    assert not symm_mem.is_symm_mem_tensor(torch.ones(3, device=NAME))


@ranks.world_of(2)
def test_use_after_free_is_refused_and_never_reaches_other_memory(rank, world_size):
    tensor, handle = _shared()
    peer = handle.get_buffer(1 - rank, (64,), torch.float32)
    del tensor
    peer.fill_(1)  # the handle keeps both
    handle.barrier()
    SIM.synchronize()
    del handle
    with pytest.raises(torch.AcceleratorError, match=rf"rank {1 - rank}'s symmetric memory, which was freed"):
        peer.fill_(1)
    other, _ = _shared()
    assert other.data_ptr() != peer.data_ptr()


SIZES = {torch.float32: (4, 256, 1020), torch.bfloat16: (8, 512, 4096)}


@pytest.mark.parametrize("world", [2, 4])
def test_operators_agree_with_collectives(world):
    ranks.run(world, _operators)


def _operators(rank, world_size):
    group = dist.group.WORLD.group_name
    operators = torch.ops.symm_mem
    torch.manual_seed(rank)
    for (dtype, sizes), shift in itertools.product(SIZES.items(), (0, 16)):
        for size in sizes:
            whole, _ = _shared(size + shift, dtype)
            tensor, given = whole[shift:], torch.randn(size, device=NAME).to(dtype)
            expected = given.clone()
            dist.all_reduce(expected)
            out = torch.empty_like(given)
            results = (
                operators.one_shot_all_reduce(tensor.copy_(given), "sum", group),
                operators.one_shot_all_reduce_out(tensor, "sum", group, out.clone()),
                operators.one_shot_all_reduce_copy(tensor.zero_(), given, "sum", group),
                operators.two_shot_all_reduce_out(tensor.copy_(given), "sum", group, out.clone()),
                operators.two_shot_all_reduce_(tensor.copy_(given), "sum", group),
            )
            for result in results:
                torch.testing.assert_close(result, expected, rtol=0, atol=0)
            unit = world_size * 16 // dtype.itemsize
            if size % unit == 0 and shift == 0:
                part = torch.empty(size // world_size, dtype=dtype, device=NAME)
                tensor.copy_(given)
                operators.reduce_scatter_out(tensor, group, False, part)
                torch.testing.assert_close(part, expected.chunk(world_size)[rank], rtol=0, atol=0)
                rows = torch.empty(2, size // 2 // world_size, dtype=dtype, device=NAME)
                if size // 2 % unit == 0:
                    operators.reduce_scatter_out(tensor.view(2, -1), group, True, rows)
                    torch.testing.assert_close(
                        rows, expected.view(2, -1).chunk(world_size, dim=1)[rank], rtol=0, atol=0
                    )
    for symmetric in (True, False):
        one = _shared()[0].fill_(rank) if symmetric else torch.full((64,), float(rank), device=NAME)
        gathered = torch.ops._c10d_functional.wait_tensor(operators._low_contention_all_gather(one, group))
        assert gathered.view(world_size, 64).eq(torch.arange(world_size, device=NAME)[:, None]).all()
        scattered = operators._low_contention_reduce_scatter(one, "sum", group)
        assert torch.ops._c10d_functional.wait_tensor(scattered).eq(sum(range(world_size))).all()
    SIM.synchronize()


@pytest.mark.parametrize("by_rows", [False, True])
@ranks.world_of(2)
def test_scaled_matmuls_agree_with_their_parts(rank, world_size, by_rows):
    torch.manual_seed(0)
    given = torch.randn(world_size, 32, 64, device=NAME).to(torch.float8_e4m3fn)
    right = torch.randn(16, 64, device=NAME).to(torch.float8_e4m3fn).t()
    scales = torch.rand(32, 1, device=NAME) if by_rows else torch.tensor(0.5, device=NAME)
    of_right = torch.rand(1, 16, device=NAME) if by_rows else torch.tensor(2.0, device=NAME)
    group, kind = dist.group.WORLD.group_name, torch.bfloat16
    products = [torch._scaled_mm(each, right, scales, of_right, out_dtype=kind) for each in given]
    _, (result,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        given[rank], [right], scales, [of_right], 0, group, [None], [None], [kind], [False]
    )
    assert torch.equal(result, torch.cat(products))
    result = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        given[rank], right, scales, of_right, "sum", 0, 0, group, [32, 16], out_dtype=kind
    )
    torch.testing.assert_close(result, sum(products).chunk(world_size)[rank], rtol=0, atol=0)
    SIM.synchronize()


@ranks.world_of(2)
def test_words_are_written_on_the_stream(rank, world_size):
    words, _ = _shared(8, torch.uint32)
    _SymmetricMemory.memset32(words, offset=2, val=7, count=3)
    _SymmetricMemory.stream_write_value32(words, 7, 2**32 - 1)
    assert words.tolist() == [0, 0, 7, 7, 7, 0, 0, 2**32 - 1]
    for call, text in (
        (lambda: _SymmetricMemory.memset32(words, 7, 1, 2), r"offset \+ count \(9\) exceeded the numel"),
        (lambda: _SymmetricMemory.memset32(words.view(2, 4), 0, 1, 1), "flat, contiguous uint32"),
        (lambda: _SymmetricMemory.stream_write_value32(words, 0, 2**32), "val must be in the range"),
        (lambda: _SymmetricMemory.stream_write_value32(words, -1, 1), "greater than or equal to 0"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


@ranks.world_of(3)
def test_order_through_a_rank_without_symmetric_memory_counts(rank, world_size):
    pair = dist.new_group([0, 1])
    token = torch.ones(2, device=NAME)
    for mended in (False, True):
        races.start()
        try:
            assert _native.host_stamp() == b"" or mended, "a program without symmetric memory must pay nothing"
            tensor, handle = _shared(group=pair) if rank < 2 else (None, None)
            dist.barrier() if mended else None
            if rank == 0:
                handle.get_buffer(1, (64,), torch.float32).fill_(1)
                dist.send(token, 2 if mended else 1)
            if rank == 2 and mended:
                dist.recv(token, 0)
                dist.send(token, 1)
            if rank == 1:
                dist.recv(token, 2 if mended else 0)
                tensor.sum()
            SIM.synchronize()
        finally:
            found = races.stop()
        assert not found, races.render(found)
        dist.barrier()
