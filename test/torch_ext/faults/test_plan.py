"""The text form of fault plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ext.faults.plan import COLLECTIVE, OF_A_CALL, TIME, Fault, Plan, Point, draw, family, parse, read, simpler

NAMES = st.sampled_from(["a", "layers.1", "pkg.Class.save", "up-date", "of_group"])
NUMBERS = st.integers(1, 10**6)
VALUES = {
    "raise": st.sampled_from(["", "ValueError", "torch.OutOfMemoryError"]),
    "kill": st.sampled_from(["", "SIGTERM", "SIGSEGV"]),
    "exit": st.sampled_from(["", "0", "17"]),
    "stop": st.floats(0, 1e4).map(lambda seconds: f"{float(f'{seconds:.3f}'):g}s"),
    "corrupt": st.sampled_from(["", "element 7", "bit 3", "element 7 bit 31"]),
    "slow": st.sampled_from(["2x", "1.5x"]),
    "split": st.sampled_from(["0", "0, 3"]),
    "fail": st.just("allocation"),
    "fill": st.sampled_from(["disk", "disk after 4096"]),
    **dict.fromkeys(("hang", "drop", "duplicate"), st.just("")),
}
VALUES["delay"] = VALUES["stop"]


@st.composite
def points(draw, kind):
    places = [""] if kind in ("fail", "slow", "split") else ["", "call"] if kind in OF_A_CALL else ["", "forward",
        "backward", "step", "phase", "call", TIME, *["write"] * (kind != "raise")]  # fmt: skip
    where = draw(st.sampled_from(places))
    if where == TIME:
        return Point(where, draw(st.sampled_from(["5ms", "0.5us", "20ns", "1s"])))
    number, generation = draw(NUMBERS), draw(st.sampled_from([0, 1, 12, None]))
    if kind == "fail":
        return Point(number=number, generation=generation)
    name = draw(st.sampled_from(["", COLLECTIVE, "all_reduce", "send"]) if not where else NAMES)
    name = f"/tmp/{name}" if where == "write" else name
    group = draw(st.sampled_from(["", "dp", "default_pg"])) if not where else ""
    return Point(where, "" if where == "step" else name, number, draw(st.booleans()), group, generation)


@st.composite
def faults(draw):
    kind = draw(st.sampled_from(sorted(VALUES)))
    ranks = draw(st.sets(st.integers(0, 9), max_size=3))
    return Fault(kind, draw(VALUES[kind]), draw(points(kind)), tuple(sorted(ranks)))


@given(st.lists(faults(), min_size=1, max_size=4))
def test_a_printed_plan_reads_as_itself(listed):
    plan = Plan(tuple(listed))
    assert parse(str(plan)) == plan
    assert str(parse(str(plan))) == str(plan)


def test_a_plan_may_be_a_file_with_comments(tmp_path):
    file = tmp_path / "plan"
    file.write_text(
        "# the dead\nrank 1: kill at all_reduce # of the gradients\n\nranks 3,0 :delay 500ms at #5 of group dp;"
    )
    assert str(read(str(file))) == "rank 1: kill at all_reduce #1; ranks 0, 3: delay 0.5s at #5 of group dp"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no fault; expected one, such as 'rank 1: kill at all_reduce #3'"),
        ("kill at all_reduce #3", "is not one; expected RANK: KIND at POINT"),
        ("rank 1: boil at #3", "there is no kind 'boil' of fault; expected one of raise, kill,"),
        ("rank 1: delay at #3", "'delay' cannot take ''; expected something like 'delay 500ms'"),
        ("rank 1: kill SIGFOO", "there is no signal SIGFOO"),
        ("rank 1: kill at all_recduce #3", "there is no operation 'all_recduce'; expected collective, all_reduce,"),
        ("rank 1: kill at all_reduce #0", "'all_reduce #0' is no point; expected one like 'all_reduce #3'"),
        ("rank 1: drop at step #2", "'drop' is for a call"),
        ("rank 1: slow 2x at call of torch.save", "'slow' is for calls of process groups"),
        ("rank 1: raise at write to /ckpt #2", "a write cannot raise; 'fill disk' makes it fail"),
        ("rank 1: slow 2x at virtual time 5ms", "'slow' is for calls of process groups"),
        ("rank 1: kill at virtual time soon", "expected a time and no number, such as 'virtual time 5ms'"),
        ("rank 1: kill at virtual time 5ms #2", "expected a time and no number, such as 'virtual time 5ms'"),
        ("rank 1: fill bucket", "'fill' cannot take 'bucket'; expected something like 'fill disk after 4096'"),
        ("rank 1: kill at phase #2", "expected a name, as in 'phase save'"),
        ("rank 1: kill at step two #2", "steps have numbers only"),
        ("rank 1: kill at step #2 of group dp", "only calls of process groups are of a group"),
    ],
)
def test_a_wrong_plan_says_what_was_expected(text, said):
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert said in str(raised.value)


def test_variants_of_an_operation_are_one():
    names = "allgather_ _all_gather_base all_gather_into_tensor_coalesced isend recv_any_source_ reduce_ alltoall_base_"
    families = [family(name) for name in names.split()]
    assert families == ["all_gather", "all_gather", "all_gather", "send", "recv", "reduce", "all_to_all"]


def test_a_seed_draws_one_plan_and_all_places_are_drawn():
    calls = {0: 2, 3: 4}
    drawn = [str(draw(seed, calls, ["kill", "delay 1s"])) for seed in range(300)]
    assert drawn == [str(draw(seed, calls, ["kill", "delay 1s"])) for seed in range(300)]
    assert len(set(drawn)) == 2 * (2 + 4)
    with pytest.raises(ValueError, match="made no collective"):
        draw(0, {}, ["kill"])


@given(st.lists(faults(), min_size=1, max_size=3))
def test_simpler_plans_have_fewer_or_earlier_faults(listed):
    plan = Plan(tuple(listed))
    for other in simpler(plan):
        earlier = sum(each.point.number for each in other.faults) < sum(each.point.number for each in plan.faults)
        assert len(other.faults) == len(plan.faults) - 1 or (len(other.faults) == len(plan.faults) and earlier)
