"""What the command passes to the runner for files of a PyTorch checkout. Imported at each start, so it loads little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_ext.runner.executor import Judge, Upstream

__all__ = ["UPSTREAM"]


def _judge(paths: Sequence[Path], lists: Sequence[str], surroundings: Mapping[str, str]) -> Judge:
    from torch_ext.upstream import judge  # on use: other runs pay nothing for it

    return judge.Judge(paths, lists, surroundings)


UPSTREAM = Upstream(("torch_ext.upstream.bridge", "torch_ext.upstream.file"), _judge)
