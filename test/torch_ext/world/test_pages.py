"""Pages that a zygote joins before it forks often: when, and that nothing in them changes."""

import mmap

import pytest

from test.torch_ext.interpreter import python
from test.torch_ext.world.suites import suite_of
from torch_ext.world import _os
from torch_ext.world.protocol import Order
from torch_ext.world.zygote import _Pages

HUGE = """
def huge(pid):
    with open(f"/proc/{pid}/smaps_rollup") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("AnonHugePages"))
"""


@pytest.fixture(scope="module")
def kernel_that_joins():
    with mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE) as some:
        some[::4096] = b"x" * len(some[::4096])
        try:
            some.madvise(25)
        except OSError:
            pytest.skip("this kernel joins no pages (MADV_COLLAPSE): use Linux 6.1 or later")


@pytest.mark.parametrize(
    "forks",
    [["rank:main"] * 16, ["provider:load_module"] * 2, ["provider:serve_as_copy", *["rank:main"] * 8]],
    ids=["ranks", "zygotes", "both"],
)
def test_pages_are_joined_once_when_forks_have_lost_as_much_time(monkeypatch, forks):
    joined = []
    monkeypatch.setattr(_os, "join_pages", lambda: joined.append(True))
    pages = _Pages()
    orders = [Order(f"torch_ext.world.{target}", None, 0) for target in forks]
    for order in orders[:-1]:
        pages.before([order])
    assert not joined
    pages.start()  # in a child, whose own forks count
    pages.before(orders[:-1])
    assert not joined
    pages.before(orders[-1:])
    assert joined == [True]
    pages.before(orders)
    pages.start()
    pages.before(orders)
    assert joined == [True]


def test_content_stays_and_a_child_has_huge_pages(kernel_that_joins):
    program = f"""
import os, random
from torch_ext.world import _os
{HUGE}
random.seed(7)
blocks, before = [random.randbytes(1 << 20) for _ in range(64)], huge("self")
_os.join_pages()
random.seed(7)
assert all(block == random.randbytes(1 << 20) for block in blocks)
if not (pid := os.fork()):
    os._exit(huge("self") - before < 16 << 10)  # of 64 MiB
assert os.waitpid(pid, 0)[1] == 0
"""
    ran = python("-c", program)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.costly
def test_a_zygote_that_has_started_many_ranks_joins_its_pages(kernel_that_joins, tmp_path):
    tests = "".join(f"\n    test_{number:02} = note_pages" for number in range(12))
    source = f"""{HUGE}
def note_pages(self):
    with open(HERE + "/pages", "a") as stream:
        stream.write(f"{{huge(os.getppid())}}\\n")


class TestMany(Ranks):{tests}
"""
    with suite_of(tmp_path, source) as suite:
        run = suite.run()
        assert run.code == 0, run
        pages = [int(each) for each in (tmp_path / "pages").read_text().split()]
    assert len(pages) >= 24 and pages[0] < 20 << 10 < pages[-1], pages
