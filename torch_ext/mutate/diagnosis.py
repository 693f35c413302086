"""Whether the failure of a test is about the mutant that it has caught, as its reader would say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from torch_ext.mutate.sources import Mutant

_RESET = re.compile(r"connection (was )?(reset|closed|refused)|closed by peer|broken pipe", re.IGNORECASE)
_COMMON = re.compile(
    "self|return|false|params?|state|group|device|tensors?|modules?|torch|contextlib|nullcontext|index"
)
# Words of code -> words of a failure that are about the same subject.
_SUBJECTS = {
    "grad": "gradient", "dtype": "types?|dtype|float", "unshard|prefetch|gather": "gather", "reduce|scatter": "reduc",
    "order|index|event|wait|stream": "order|before|overlap|race", "reshard|sharded|alloc|free": "shard|held|storage",
}  # fmt: skip
_RARE = 0.1  # a word is rare in at most this part of the failures


def diagnosis(mutant: Mutant, text: str, test: str = "", rare: Collection[str] = ()) -> str:
    """Return whether a failure's ``text`` is about the subject of ``mutant``: it names the function, or something in
    the changed lines; or its headline, message or ``test`` has a word for the same subject, or shares a ``rare`` word
    with the name of the function or module. Otherwise it is a lost connection, or unrelated.
    """
    changed = "\n".join(line[1:] for line in mutant.diff.splitlines()[1:] if line[:1] in "+-")
    found = [mutant.function.rpartition(".")[2], *re.findall(r"[A-Za-z_]{5,}", changed)]
    found += ["RaceError"] if mutant.operator == "wait dropped" else []
    texts = (text, *(each for each in found if not _COMMON.fullmatch(each)))
    said, *names = (re.sub("[^a-z0-9]+", " ", each.lower()) for each in texts)
    if any(f" {name.strip()}" in f" {said}" for name in names if len(name) > 4):
        return "named"
    shown = _shown(text, test)
    about = f"{found[0]} {changed}", shown
    if any(all(map(re.search, pair, about)) for pair in _SUBJECTS.items()):
        return "named"
    if _words(shown) & _words(f"{mutant.module.rpartition('.')[2]} {mutant.function}") & {*rare}:
        return "named"
    return "reset connection" if _RESET.search(text) else "unrelated"


def _shown(text: str, test: str) -> str:
    """Return the parts of a failure that readers see first: the test's name, the headline and the message."""
    headline, _, rest = text.partition("\n")
    message = rest.rpartition("Error: ")[2][:400] if "Error: " in rest else ""
    return f"{test.rpartition('::')[2]} {headline} {message}"


def _words(text: str) -> set[str]:
    """Return the stems of the longer words.

    >>> sorted(_words("DataParallel.quantization_hook test_quantized"))
    ['parallel', 'quantiz']
    """
    found = re.findall("[a-z]{5,}", re.sub("(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {re.sub("(ations?|ings?|ed|es|s|ers?)$", "", word) for word in found}


def diagnoses(caught: Sequence[tuple[Mutant, str, str]]) -> tuple[list[str], float]:
    """Return the diagnosis of each of ``caught``, a mutant with the text and the test of its failure; and, to compare
    with, the share of mutants that failures of other mutants name.
    """
    number = Counter(word for _, text, test in caught for word in _words(_shown(text, test)))
    rare = {word for word, times in number.items() if times <= max(1, _RARE * len(caught))}
    others = [
        (each[0], *caught[i - shift][1:]) for shift in range(1, min(6, len(caught))) for i, each in enumerate(caught)
    ]
    named = [diagnosis(*each, rare) == "named" for each in others]
    return [diagnosis(*each, rare) for each in caught], sum(named) / max(len(named), 1)
