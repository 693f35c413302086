"""The checker reports exactly the programs in which two accesses meet that nothing orders, held against every
interleaving of small programs.
"""

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from test.torch_ext.sim.races import interleavings as il
from torch_ext.sim import _native

STREAMS = 3
GROUP = STREAMS  # the lane of a group's collectives
LANES = STREAMS + 1
BYTES = 24
PINNED = 9  # a tensor that the host may use, too
KINDS = ("use", "use", "copy", "pinned", "record", "wait", "wait", "free", "allocate", "users", "collective")


@st.composite
def views(draw):
    itemsize = draw(st.sampled_from([1, 2]))
    room = BYTES // itemsize
    begin = draw(st.sampled_from([0, 0, 1, room // 2]))
    kind = draw(st.sampled_from(["all", "slice", "every second", "column", "overlapping"]))
    left = room - begin
    sizes, strides = {
        "all": ((left,), (1,)),
        "slice": ((max(1, left // 3),), (1,)),
        "every second": (((left + 1) // 2,), (2,)),
        "column": ((max(1, left // 4), 2), (4, 1)),
        "overlapping": ((3, max(1, left // 2)), (2, 1)),
    }[kind]
    view = il.View(begin * itemsize, itemsize, sizes, strides)
    return view if max(view.bytes) < BYTES else il.View(0, itemsize, (room,), (1,))


@st.composite
def programs(draw):  # noqa: C901
    """Up to ten steps after two tensors on the first stream, and one of pinned memory, have been allocated."""
    steps = [il.Allocate(0, 0), il.Allocate(1, 0), il.Allocate(PINNED, LANES)]
    live = {0: 0, 1: 0}
    streams = st.integers(0, STREAMS - 1)
    for _ in range(draw(st.integers(2, 10))):
        kind = draw(st.sampled_from(KINDS))
        tensors = st.sampled_from(sorted(live))
        if kind == "use" and live:
            one = (draw(tensors), draw(views()))
            steps.append(draw(st.sampled_from([il.Use(draw(streams), (one,)), il.Use(draw(streams), (), (one,))])))
        elif kind == "copy" and live:
            steps.append(il.Use(draw(streams), ((draw(tensors), draw(views())),), ((draw(tensors), draw(views())),)))
        elif kind == "pinned":
            lane = draw(st.integers(il.HOST, STREAMS - 1))
            one = (PINNED, draw(views()))
            steps.append(draw(st.sampled_from([il.Use(lane, (one,)), il.Use(lane, (), (one,))])))
        elif kind == "record":
            steps.append(il.Record(draw(streams), draw(st.integers(0, 1))))
        elif kind == "wait":
            steps.append(il.Wait(draw(st.integers(il.HOST, STREAMS - 1)), draw(st.integers(0, 1))))
        elif kind == "free" and live:
            tensor = draw(tensors)
            del live[tensor]
            steps.append(il.Free(tensor))
        elif kind == "allocate" and len(live) < 2:
            tensor = min({0, 1} - set(live))
            live[tensor] = draw(st.sampled_from([0, 0, 1]))
            steps.append(il.Allocate(tensor, live[tensor]))
        elif kind == "collective" and live:
            use = il.Use(GROUP, ((draw(tensors), draw(views())),), ((draw(tensors), draw(views())),))
            steps += il.collective(draw(streams), GROUP, (use,), done=draw(st.integers(0, 1)), own=10 + len(steps))
        elif kind == "users" and live:
            steps.append(il.RecordStream(draw(tensors), draw(streams)))
    return steps


@st.composite
def lifetimes(draw):
    """One tensor is used on a side stream, freed, and its memory is handed out again; each wait may be missing."""
    side, view = draw(st.sampled_from([1, 2])), draw(views())
    after = draw(st.sampled_from([0, 0, side, il.HOST]))
    optional = [
        [il.Use(0, (), ((0, view),))],
        [il.Record(0, 0)],
        [il.Wait(side, 0)],
        [il.Use(side, ((0, view),))],
        [il.RecordStream(0, draw(st.sampled_from([1, 2])))],
        [il.Record(side, 1), il.Wait(after, 1)],
        [il.Free(0), il.Allocate(0, 0)],
        [il.Wait(draw(st.integers(il.HOST, STREAMS - 1)), draw(st.integers(0, 1)))],
        [il.Use(draw(st.sampled_from([0, 0, 1, 2])), (), ((0, draw(views())),))],
        [il.Free(0), il.Allocate(0, 0), il.Use(0, ((0, view),), ((0, view),))],
    ]
    kept = itertools.chain.from_iterable(steps for steps in optional if draw(st.integers(0, 3)))
    return [il.Allocate(0, 0), *kept]


@st.composite
def events(draw):
    """One event, recorded early, late, twice or on another stream; each step may be missing."""
    view = il.View(0, 1, (2,), (1,))
    writer, other = draw(st.permutations(range(STREAMS)))[:2]
    after = draw(st.sampled_from([other, other, il.HOST]))
    optional = [
        il.Use(writer, (), ((PINNED, view),)),
        il.Record(writer, 0),
        il.Use(writer, (), ((PINNED, view),)),
        il.Record(draw(st.sampled_from([writer, other])), 0),
        il.Use(writer, ((PINNED, view),)),
        il.Wait(after, 0),
        il.Use(after, (), ((PINNED, view),)),
    ]
    return [il.Allocate(PINNED, LANES), *(step for step in optional if draw(st.integers(0, 3)))]


def hold(steps, fault=""):
    """Hold what the checker says against every interleaving."""
    racing, reported = il.Machine(steps, LANES).explore(), il.check(steps, LANES, fault)
    assert bool(reported) == bool(racing), f"the checker says {reported}, the interleavings say {sorted(racing)}"
    assert set(reported) <= racing, "a pair was reported that every interleaving orders"


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.one_of(programs(), lifetimes(), events()))
def test_checker_reports_exactly_the_programs_with_unordered_conflicts(steps):
    hold(steps)


@pytest.mark.parametrize("fault", il.FAULTS)
def test_planted_fault_of_the_checker_is_found(fault):
    @settings(max_examples=600, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(st.one_of(programs(), lifetimes(), events()))
    def find(steps):
        hold(steps, fault)

    with pytest.raises(AssertionError, match=r"the checker says|every interleaving orders"):
        find()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(views(), views())
def test_views_meet_exactly_if_they_share_a_byte(one, other):
    checker, block = _native.RaceChecker(), _native.RaceMemory()
    for origin, view in enumerate((one, other)):
        checker.access(checker.lane(), block, True, view.begin, view.itemsize, view.sizes, view.strides, origin)
    assert bool(checker.races()) == bool(one.bytes & other.bytes)


def test_no_column_of_thousands_is_forgotten():
    rows, columns = 100, 5000
    checker = _native.RaceChecker()
    one, other, block = checker.lane(), checker.lane(), _native.RaceMemory()
    for _ in range(2):
        for column in range(columns):
            checker.access(one, block, True, column * 4, 4, [rows], [columns], 1)
    assert block.kept() == columns
    for column in (0, columns // 2, columns - 1):
        assert checker.access(other, block, False, column * 4, 4, [1], [1], 2)
    assert checker.is_dangerous(block, other)
    checker.access(one, block, True, 0, 4, [rows * columns], [1], 1)
    assert block.kept() == 1


def test_a_block_used_in_order_keeps_one_stretch():
    checker = _native.RaceChecker()
    lane, block = checker.lane(), _native.RaceMemory()
    for _ in range(100):
        checker.access(lane, block, True, 0, 4, [64], [1], 1)
        for part in range(8):
            checker.access(lane, block, False, part * 32, 4, [8], [1], 2)
        checker.access(lane, block, True, 0, 4, [64, 4], [4, 1], 3)
    assert block.kept() == 1 and checker.races() == []


def test_wait_that_orders_nothing_new_is_reported():
    checker = _native.RaceChecker()
    one, other, block = checker.lane(), checker.lane(), _native.RaceMemory()
    checker.access(one, block, True, 0, 4, [8], [1], 1)
    event = checker.record(one)
    assert checker.wait(other, event) is True
    assert checker.wait(other, event) is False
    assert checker.wait(one, event) is False


def test_memory_in_use_elsewhere_is_dangerous_until_the_use_ends():
    checker = _native.RaceChecker()
    home, side, block = checker.lane(), checker.lane(), _native.RaceMemory()
    checker.access(home, block, True, 0, 4, [8], [1], 1)
    checker.wait(side, checker.record(home))
    checker.access(side, block, False, 0, 4, [8], [1], 2)
    assert checker.is_dangerous(block, home)
    event = checker.record(side)
    checker.wait(checker.HOST, event)
    assert not checker.is_dangerous(block, home)
