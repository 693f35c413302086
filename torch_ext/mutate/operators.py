"""Operators: the mistakes that mutants make, general ones and those of distributed code. Most are rows of a table.

Libraries such as mutmut and cosmic-ray do not fit: their operators rewrite files, which processes would import again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Span = tuple[int, int]  # of bytes in the source
Change = tuple[ast.AST | Span, str]  # a part of the source, and its new text


class Text:
    """A module's text, and the place of each node in it."""

    def __init__(self, text: bytes) -> None:
        self.bytes, self.tree, self.starts = text, ast.parse(text), [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = len(self.starts)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> Span:
        """Return the bytes of ``node``."""
        at: dict[str, int] = vars(node)
        start = self.starts[at["lineno"] - 1] + at["col_offset"]
        return start, self.starts[at["end_lineno"] - 1] + at["end_col_offset"]

    def of(self, node: Any) -> str:
        """Return the source of ``node``."""
        return self.bytes[slice(*self.span(node))].decode() if isinstance(node, ast.AST) else ""


# Mistake -> the function that is no longer called. Where its value is used, that is then its first argument or, for
# those of `_OWN`, what the method belongs to.
_CALLS = {
    "collective dropped": r"\w*?(all_?gather|reduce_scatter|all_?reduce|all_?to_?all|broadcast|barrier|scatter_object"
    r"|gather_object|isend|irecv|redistribute)\w*",
    "wait dropped": r"wait|synchronize|record|record_event|(\w+_)?record_stream|_?wait_\w+|_?sync_\w+",
    "hook dropped": r"_?register_\w*hooks?\w*|queue_callback|remove",
    "reshard or unshard skipped": r"\w*?(reshard|unshard|prefetch|to_sharded|alloc_|free_|_free)\w*",
    "cache not invalidated": r"clear|pop|popleft|discard|cache_clear|_?reset\w*",
    "requires_grad lost": r"requires_grad_|detach|detach_|_?set_requires_grad\w*",
    "dtype of a cast": r"to|type|float|half|bfloat16|_?cast\w*|type_as",
    "padding": r"\w*pad\w*",
}
_OWN = ("requires_grad lost", "dtype of a cast")
_FUNCTIONS = ("type", "float", "cast", "typing.cast")  # that have the name of a tensor's method
# Mistake -> keywords of calls -> their values, given the old one.
_KEYWORDS = {
    "group": ("group|process_group|pg", "None"),
    "root": ("src|dst|group_src|group_dst|root", "({0}) + 1"),
    "async_op": ("async_op|non_blocking", "not ({0})"),
    "requires_grad lost": ("requires_grad", "not ({0})"),
    "dtype of a cast": ("dtype", "None"),
}
# Mistake -> names and attributes that are read, and what is read in their place.
_NAMES = {
    "rank or index off by one": (r"(\w+_)?(rank|index|idx|world_size|ndim)", "({0} + 1)"),
    "padding": (r"\w*pad\w*?_?(size|numel|len|numels)", "({0} + 1)"),
    "dtype of a cast": (r"\w+_dtype", "None"),
    "order of events": (r"(\w+_)?order|post_forward_index", "{0}[::-1]"),
}
# Attribute -> another one of its class, and the mistake.
_ATTRIBUTES = {
    **dict.fromkeys(("SUM", "MIN", "PRODUCT"), ("reduction", "MAX")), "AVG": ("reduction", "SUM"),
    "MAX": ("reduction", "MIN"), "float32": ("dtype of a cast", "bfloat16"),
    **dict.fromkeys(("bfloat16", "float16", "float64"), ("dtype of a cast", "float32")),
}  # fmt: skip
_TEST = (("condition negated", "test", "not ({test})"), ("condition constant", "test", "False"))
_EITHER = (*_TEST, ("condition constant", "test", "True"))
_SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
_BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
# Kind of a node, perhaps with that of its `op` -> mistake, the part that changes (empty: all of it), and its new text.
_ROWS: Mapping[Any, tuple[tuple[str, str, str], ...]] = {
    **{(ast.Compare, kind): (("boundary", "", f"{{left}} {sign} {{comparators}}"),) for kind, sign in _BOUNDS.items()},
    **{(ast.BinOp, kind): (("arithmetic", "", f"({{left}} {sign} {{right}})"),) for kind, sign in _SIGNS.items()},
    ast.If: _EITHER, ast.IfExp: _EITHER, ast.While: _TEST, ast.For: (("loop cut", "iter", "[*{iter}][1:]"),),
    ast.Expr: (("statement deleted", "", "pass"),), ast.AugAssign: (("statement deleted", "", "pass"),),
    ast.Return: (("return value", "", "return None"),), ast.Raise: (("exception swallowed", "", "pass"),),
    ast.Break: (("break for continue", "", "continue"),), ast.Continue: (("break for continue", "", "break"),),
}  # fmt: skip
# Calls that only speak to a person or a profiler: no suite is to notice a change of their words.
_TALK = re.compile(r"(.*\.)?(_?log\w*|warn\w*|print|record_function|profile)(\.\w+)*")
# Statements that leave no trace but a line below a warning, torch's count of its users, or times.
_UNSEEN = re.compile(
    r"(.*\.)?_?log(ger|ging)?\.(debug|info)|print|(.*\.)?_log_api_usage_once|SimpleProfiler\.\w+|(.*\.)?_(p_)?assert\w*"
)
# Loops whose order other ranks or streams see.
_ORDERED = re.compile(r".*(group|order|handle|state|work|event|bucket)s?\b.*", re.DOTALL)


def is_talk(node: ast.AST) -> bool:
    """Whether nothing within ``node`` counts: messages, imports."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    return isinstance(node, ast.Call) and _TALK.fullmatch(ast.unparse(node.func)) is not None


def is_unseen(node: ast.AST) -> bool:
    """Whether no suite is to notice that ``node`` is gone: a line of a log, or an assertion, by which the code checks
    itself; ``if`` with a lone ``raise AssertionError`` is one, as torch writes them.
    """
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _UNSEEN.fullmatch(ast.unparse(node.value.func)) is not None
    raised = node.body[0] if isinstance(node, ast.If) and not node.orelse else node
    if isinstance(raised, ast.Raise) and raised.exc:
        return ast.unparse(raised.exc).startswith("AssertionError")
    return isinstance(node, ast.Assert)


def is_docstring(node: ast.AST) -> bool:
    """Whether ``node`` is a statement that is a constant: a string, or the ``...`` of a stub."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def first_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """Return the first statement that does something."""
    return next((each for each in function.body if not is_docstring(each)), function.body[-1])


def proposals(node: ast.AST, text: Text) -> Iterator[tuple[str, bool, list[Change]]]:
    """Yield the mistakes that can be made at ``node``: the operator, whether it is one of distributed code, and what
    changes. Those of distributed code come first: of two that come to the same, the first counts.
    """
    for is_field, operators in ((True, (_calls, _reads, _statements)), (False, (_rows, _parts))):
        for operator in operators:
            for name, *changes in operator(node, text):
                yield name, is_field, changes


_Proposed = Iterable[tuple[Any, ...]]  # the name of a mistake, and its changes


def _calls(node: ast.AST, text: Text) -> _Proposed:
    if not isinstance(node, ast.Call):
        return
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for mistake, names in _CALLS.items():
        if re.fullmatch(names, function) and text.of(node.func) not in _FUNCTIONS:
            own = node.func.value if isinstance(node.func, ast.Attribute) and mistake in _OWN else None
            left = None if isinstance(text.parents[node], ast.Expr) else own or next(iter(node.args), None)
            yield mistake, (node, text.of(left) or "None")
    for keyword in node.keywords:
        for mistake, (names, new) in _KEYWORDS.items():
            if re.fullmatch(names, keyword.arg or ""):
                yield mistake, (keyword.value, new.format(text.of(keyword.value)))


def _reads(node: ast.AST, text: Text) -> _Proposed:
    parent = text.parents[node]
    if not isinstance(getattr(node, "ctx", None), ast.Load) or (isinstance(parent, ast.Call) and parent.func is node):
        return
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    for mistake, (names, new) in _NAMES.items():
        if re.fullmatch(names, name):
            yield mistake, (node, new.format(text.of(node)))
    if isinstance(node, ast.Attribute) and name in _ATTRIBUTES:
        mistake, other = _ATTRIBUTES[name]
        yield mistake, (node, f"{text.of(node.value)}.{other}")


def _statements(node: ast.AST, text: Text) -> _Proposed:
    if isinstance(node, ast.Try) and node.finalbody and not node.handlers and not node.orelse:
        # An exception leaves without what `finally` restores.
        start, last = text.span(node)[0], text.bytes.rindex(b"finally", 0, text.span(node.finalbody[0])[0])
        yield "not restored after an exception", ((start, start + 3), "if 1"), ((last, last + 7), "if 1")
    for item in node.items if isinstance(node, ast.With) else ():
        if item.optional_vars is None and not is_talk(item.context_expr):
            yield "context left out", (item.context_expr, '__import__("contextlib").nullcontext()')
    if isinstance(node, ast.For) and _ORDERED.fullmatch(text.of(node.iter)):
        yield "order of events", (node.iter, f"[*{text.of(node.iter)}][::-1]")
    if isinstance(node, (ast.Assign, ast.Delete)) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        is_empty = isinstance(node, ast.Delete) or ast.unparse(node.value) in ("None", "False", "[]", "{}")
        is_grad = getattr(node.targets[0], "attr", "") in ("requires_grad", "grad")
        if is_grad or is_empty:
            yield "requires_grad lost" if is_grad else "cache not invalidated", (node, "pass")
    if isinstance(node, ast.FunctionDef):
        args, given = node.args, [*node.args.posonlyargs, *node.args.args][::-1]
        pairs = [*zip(given, args.defaults[::-1], strict=False), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        for argument, default in pairs:
            if default is not None:
                yield "argument ignored", _inserted(node, f"{argument.arg} = {text.of(default)}", text)


def _inserted(node: ast.FunctionDef, statement: str, text: Text) -> Change:
    """Return the change that puts ``statement`` before the others of a function."""
    first = first_of(node)
    start, _ = text.span(first)
    return (start, start), f"{statement}\n{' ' * first.col_offset}"


def _rows(node: ast.AST, text: Text) -> _Proposed:
    if isinstance(node, ast.Return) and node.value is None:
        return  # compiles to other instructions than `return None`, and means the same
    operators = getattr(node, "ops", None) or [getattr(node, "op", None)]
    kinds = (type(node), (type(node), type(operators[0]) if len(operators) == 1 else None))
    for mistake, part, new in (row for kind in kinds for row in _ROWS.get(kind, ())):
        parts = {name: value[0] if name == "comparators" else value for name, value in ast.iter_fields(node)}
        texts = {name: text.of(value) for name, value in parts.items() if isinstance(value, ast.expr)}
        yield mistake, (getattr(node, part) if part else node, new.format(**texts))


def _parts(node: ast.AST, text: Text) -> _Proposed:
    if isinstance(node, ast.BoolOp):
        parts, words = [f"({text.of(each)})" for each in node.values], (" and ", " or ")
        word, other = words if isinstance(node.op, ast.And) else words[::-1]
        yield "and for or", (node, f"({other.join(parts)})")
        for index in range(len(parts)):
            yield "part of a condition left out", (node, f"({word.join(parts[:index] + parts[index + 1 :])})")
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", (node, str(not node.value if isinstance(node.value, bool) else node.value + 1))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield "statement deleted", (node, "pass")
    elif isinstance(node, ast.FunctionDef):
        yield "early return", _inserted(node, "return None", text)
    elif isinstance(node, ast.Call):
        function, plain = text.of(node.func), len(node.args)
        named = [(f"{each.arg}=" if each.arg else "**") + text.of(each.value) for each in node.keywords]
        texts = [*map(text.of, node.args), *named]
        for index in range(plain - (plain > 1), len(texts)):
            yield "argument dropped", (node, f"{function}({', '.join(texts[:index] + texts[index + 1 :])})")
        for index in range(plain - 1):
            swapped = [*texts[:index], texts[index + 1], texts[index], *texts[index + 2 :]]
            yield "arguments swapped", (node, f"{function}({', '.join(swapped)})")
