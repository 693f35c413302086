"""What a mistake is, for the tables of them."""

from __future__ import annotations

from dataclasses import dataclass

from test.torch_ext.suite_faults.mutation import Edit

__all__ = ["BEFORE", "TRAINED", "Fault", "fault"]

# What the properties of training say when it went wrong.
BEFORE, TRAINED = "parameters before training", "(losses of sharded|parameters after) training"


@dataclass(frozen=True)
class Fault:
    """A mistake.

    Attributes:
        edits: what it changes in torch.
        noticed_by: the test that fails for it: module below ``test.distributed``, class and method.
        says: what the report of that failure contains, a regular expression.
        device: where that test runs: some need memory apart from the host's, or accounted for.
    """

    edits: tuple[Edit, ...]
    noticed_by: str
    says: str
    device: str = "cpu"


def fault(function: str, old: str, new: str, noticed_by: str, says: str, device: str = "cpu") -> Fault:
    return Fault((Edit(function, old, new),), noticed_by, says, device)
