"""One export from beginning to end: find, link, write, lint, check, tell."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_ext.upstream.export import change, check, lint, patch
from torch_ext.upstream.export.cover import cover
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.pieces import Target
from torch_ext.upstream.export.trees import file_at, our_tree, project_root, upstream_at
from torch_ext.upstream.export.write import text_of

__all__ = ["Request", "Result", "export"]


@dataclass(frozen=True)
class Request:
    """What is to go where.

    Attributes:
        what: see :func:`torch_ext.upstream.export.change.add`.
        onto: the PyTorch checkout.
        branch: commit on this new branch; empty to make a mail only.
        subject, tools: for the message.
        devices: where to run it before it is sent; none to not run it.
    """

    what: Sequence[str]
    onto: Path
    branch: str = ""
    subject: str = ""
    tools: Sequence[str] = ()
    devices: Sequence[str] = ()


@dataclass
class Result:
    """What came of it. With problems there is no mail and no branch."""

    problems: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    mail: str = ""
    runs: list[check.Run] = field(default_factory=list)


def export(request: Request, say: Callable[[str], None] = lambda line: None) -> Result:
    """Make the patch that ``request`` asks for.

    Raises:
        CheckoutError: the checkout, a path or a revision is not there, or the branch is there already.
        NoAuthorError: git does not know who runs this.
    """
    root, theirs = project_root(), upstream_at(request.onto)
    author = patch.author_of(request.onto)
    if request.branch:
        patch.check_branch(request.onto, request.branch)
    ours = our_tree(theirs)
    linker = Linker(ours, theirs)
    change.add(linker, request.what, root)
    result = Result(problems=list(dict.fromkeys(linker.problems)))
    targets = [each for each in linker.targets.values() if each.whole or each.pieces or each.replaced]
    if not targets and not result.problems:
        result.problems.append("upstream has all of it: there is nothing to send")
    if result.problems:
        return result
    result.files = {target.path: text_of(target, ours) for target in targets}
    before = {target.path: target.existing.text for target in targets if target.existing}
    result.problems += lint.problems(result.files, before, file_at(request.onto, "pyproject.toml"))
    if result.problems:
        return result
    told: list[str] = []
    if request.devices:
        result.runs, result.problems = _checked(request, targets, result.files, author, say)
        told = [str(run) for run in result.runs]
    message = cover(targets, told, request.tools, request.subject)
    if result.problems:
        return result
    result.mail = patch.mailbox(request.onto, result.files, message, author)
    if request.branch:
        say(f"{request.branch}: {patch.commit_on_branch(request.onto, result.files, message, author, request.branch)}")
    return result


def _checked(
    request: Request, targets: Sequence[Target], files: dict[str, str], author: patch.Author, say: Callable[[str], None]
) -> tuple[list[check.Run], list[str]]:
    """Apply the change to a scratch copy, import all of it there, and run its test files."""
    mail = patch.mailbox(request.onto, files, "check\n", author)
    with tempfile.TemporaryDirectory() as folder:
        copy = check.apply_to_copy(request.onto, mail, Path(folder))
        tests = [target.path for target in targets if target.path.startswith("test/")]
        helpers = [target.module for target in targets if not target.path.startswith("test/")]
        if wrong := check.import_in_copy(copy, [*helpers, *(str(copy / each) for each in tests)]):
            return [], [f"the changed files do not import on plain torch: {wrong}"]
        runs = []
        for file in tests:
            for device in request.devices:
                runs.append(check.run_in_copy(copy, file, device))
                say(str(runs[-1]))
    return runs, [f"{run}\n{run.output}" for run in runs if not run.good]
