"""docs/laboratory.md lists every program, and is what its data says."""

from test.torch_ext.faults.page import PAGE, PROGRAMS, answers, name_of, text


def test_the_page_has_every_program():
    assert list(answers()) == [name_of(*row[:2]) for row in PROGRAMS], "run python -m test.torch_ext.faults.answers"
    assert PAGE.read_text(encoding="utf-8") == text(), "run python -m test.torch_ext.faults.page"
    assert len({program for program, *_ in PROGRAMS}) > 50 and len(PROGRAMS) >= 80
