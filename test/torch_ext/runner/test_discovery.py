"""Which files are test files, and what each one is called."""

from __future__ import annotations

from pathlib import Path

from test.torch_ext.runner.fakes import write_suite
from torch_ext.runner.names import describe, find_test_files


def test_only_test_files_are_found_in_order(tmp_path: Path) -> None:
    names = ["b/test_b.py", "test_z.py", "a/test_a.py", "a/test_a2.py"]
    strangers = ["a/common.py", "a/test_a.txt", "a/__init__.py", ".git/test_hook.py", "a/__pycache__/test_a.py"]
    write_suite(tmp_path, dict.fromkeys([*names, *strangers], ()))
    assert [file.name for file in find_test_files(tmp_path)] == sorted(names)


def test_files_may_be_called_otherwise(tmp_path: Path) -> None:
    write_suite(tmp_path, dict.fromkeys(["a/api_test.py", "a/test_api.py", "a/contest.py"], ()))
    assert [file.name for file in find_test_files(tmp_path, like=("test_*.py", "*_test.py"))] == [
        "a/api_test.py",
        "a/test_api.py",
    ]


def test_a_root_without_tests_holds_none(tmp_path: Path) -> None:
    assert find_test_files(tmp_path) == find_test_files(tmp_path / "nowhere") == ()


def test_module_name_starts_below_the_last_folder_that_is_no_package(tmp_path: Path) -> None:
    write_suite(tmp_path, dict.fromkeys(["root/__init__.py", "root/pkg/__init__.py"], ()))
    write_suite(tmp_path, dict.fromkeys(["root/pkg/test_a.py", "root/plain/test_b.py", "root/pkg/plain/test_c.py"], ()))
    found = {file.name: (file.module, file.import_root) for file in find_test_files(tmp_path / "root")}
    assert found == {
        "pkg/test_a.py": ("root.pkg.test_a", tmp_path),
        "pkg/plain/test_c.py": ("test_c", tmp_path / "root/pkg/plain"),
        "plain/test_b.py": ("test_b", tmp_path / "root/plain"),
    }


def test_this_file_is_called_what_pytest_calls_it() -> None:
    path = Path(__file__).resolve()
    file = describe(path, path.parents[2])
    assert (file.name, file.module) == ("torch_ext/runner/test_discovery.py", __name__)
    assert file.import_root == path.parents[3]
