"""The lines that set in Python what a line at fault reads: a number, a choice, an order of names.

The graph of operations does not show these. A line that runs operations is left out: the graph
has judged it. So are sizes, which the shapes of values show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from otel_torch.parity.finding import CodeLine

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
# how far names are followed from line to line, and how many lines people look at
_DEPTH, _MOST = 3, 6
# what an argument is that a caller has chosen in the call itself
_CHOSEN = ast.BinOp | ast.UnaryOp | ast.Constant | ast.IfExp | ast.Subscript
_CALLED_OTHERWISE = ("forward", "__call__", "__init__")
_SIZES = {"shape", "size", "ndim", "len", "device", "dtype"}


class _Statement(NamedTuple):
    """A statement, the function that it stands in, and the text and name of its file."""

    statement: ast.stmt
    scope: Scope
    file: str
    text: tuple[str, ...]

    def line(self) -> CodeLine:
        """Return the first line of the statement."""
        number = self.statement.lineno
        function = getattr(self.scope, "name", "<module>")
        return CodeLine(self.file, number, function, self.text[number - 1].strip())


def python_lines(
    line: CodeLine, callers: Sequence[CodeLine], computed: Set[tuple[str, int]]
) -> tuple[CodeLine, ...]:
    """Return the lines that set what a line reads, the nearest first; none without its file.

    Args:
        callers: The lines that called its function, the nearest first.
        computed: File and number of each line that runs operations.
    """
    place = _place_of(line)
    if place is None:
        return ()
    setting = _Setting(computed).of(place, _names(place.statement), callers)
    lines = dict.fromkeys(own.line() for own in setting)
    lines.pop(line, None)
    return tuple(lines)[:_MOST]


class _Setting(NamedTuple):
    """Finds what sets names without an operation."""

    computed: Set[tuple[str, int]]

    def of(
        self, place: _Statement, names: Set[str], callers: Sequence[CodeLine], depth: int = _DEPTH
    ) -> Iterator[_Statement]:
        """Yield what sets names before a place, and what sets the names that this reads; last what
        sets them for a whole file.
        """
        parameters = _parameters(place.scope)
        bindings = {name: _binding(place, name) for name in sorted(names)} if depth else {}
        of_file = [name for name, own in bindings.items() if own is None and name not in parameters]
        bindings |= {name: _global_binding(place, name) for name in of_file}
        for name in sorted(bindings, key=of_file.__contains__):
            binding = bindings[name]
            if binding is None and name in parameters and callers:
                yield from self._passed(place.scope, name, callers, depth)
            if binding is not None and self._counts(binding):
                yield binding
                # who has called another function, such as an __init__, is not known
                its = callers if _begin_of(binding) == _begin_of(place) else ()
                yield from self.of(binding, _names(binding.statement), its, depth - 1)

    def _passed(
        self, function: Scope, parameter: str, callers: Sequence[CodeLine], depth: int
    ) -> Iterator[_Statement]:
        """Yield what sets an argument where a function is called; the call, if it is no name."""
        caller = _place_of(callers[0])
        if caller is None:
            return
        for node in ast.walk(caller.statement):
            if isinstance(node, ast.Call) and _may_call(node, function):
                argument = _argument(function, parameter, node)
                if argument is not None:
                    if isinstance(argument, _CHOSEN):
                        yield caller
                    yield from self.of(caller, _names(argument), callers[1:], depth - 1)

    def _counts(self, place: _Statement) -> bool:
        """Return whether a statement runs no operation, and reads more than sizes."""
        statement = place.statement
        numbers = range(statement.lineno, _last_line(statement) + 1)
        if any((place.file, number) in self.computed for number in numbers):
            return False
        nodes = (node for head in _head(statement) for node in ast.walk(head))
        return not any(_last_name(node) in _SIZES for node in nodes)


def _may_call(call: ast.Call, function: Scope) -> bool:
    """Return whether a call may be one of a function, or of what has such a method."""
    name = _name(function)
    return _last_name(call.func) == name or name in _CALLED_OTHERWISE


def _begin_of(place: _Statement) -> int:
    return getattr(place.scope, "lineno", 0)


def _name(function: Scope) -> str:
    return getattr(function, "name", "")


def _argument(function: Scope, parameter: str, call: ast.Call) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    names = _parameters(function)
    is_method = isinstance(call.func, ast.Attribute) or _name(function) in _CALLED_OTHERWISE
    is_bound = is_method and names[:1] == ["self"]
    index = names.index(parameter) - is_bound
    return call.args[index] if 0 <= index < len(call.args) else None


def _parameters(scope: Scope) -> list[str]:
    if isinstance(scope, ast.Module):
        return []
    arguments = scope.args
    return [own.arg for own in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _binding(place: _Statement, name: str) -> _Statement | None:
    """Return the last statement of a function before a place that sets a name; of names such as
    `self.eps` the only one of the file.
    """
    if name.startswith("self."):
        tree = _parse("\n".join(place.text))
        bindings = [
            _Statement(statement, scope, place.file, place.text)
            for scope in ast.walk(tree or ast.Module([], []))
            if isinstance(scope, ast.FunctionDef)
            for statement in _statements(scope)
            if name in _bound(statement)
        ]
        return bindings[0] if len(bindings) == 1 else None
    before = [
        statement
        for statement in _statements(place.scope)
        if statement.lineno < place.statement.lineno and name in _bound(statement)
    ]
    return place._replace(statement=before[-1]) if before else None


def _global_binding(place: _Statement, name: str) -> _Statement | None:
    """Return the last statement of a file outside of functions that sets a name."""
    tree = _parse("\n".join(place.text))
    if tree is None or isinstance(place.scope, ast.Module):
        return None
    setting = [statement for statement in _statements(tree) if name in _bound(statement)]
    return place._replace(statement=setting[-1], scope=tree) if setting else None


def _statements(scope: Scope) -> Iterator[ast.stmt]:
    """Yield the statements of a function in order, without those of functions inside."""
    waiting: list[ast.AST] = list(reversed(scope.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.stmt):
            yield node
        inner = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.ExceptHandler)
        ]
        waiting += reversed(inner)


def _head(statement: ast.stmt) -> list[ast.AST]:
    """Return what a statement evaluates itself: of a loop what it goes through, not its body."""
    return [
        child
        for child in ast.iter_child_nodes(statement)
        if not isinstance(child, ast.stmt | ast.ExceptHandler)
    ]


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement sets, whole or a part of them."""
    names = set()
    for head in _head(statement):
        for node in ast.walk(head):
            if isinstance(getattr(node, "ctx", None), ast.Store):
                while isinstance(node, ast.Subscript):
                    node = node.value
                names.add(_full_name(node))
    return names - {""}


def _names(statement: ast.AST) -> set[str]:
    """Return the names that a statement, or an expression, reads."""
    heads = _head(statement) if isinstance(statement, ast.stmt) else [statement]
    return {
        _full_name(node)
        for head in heads
        for node in ast.walk(head)
        if isinstance(getattr(node, "ctx", None), ast.Load)
    } - {"", "self"}


def _full_name(node: ast.AST) -> str:
    """Return `x` or `self.x`, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and _last_name(node.value) == "self":
        return f"self.{node.attr}"
    return ""


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _last_line(statement: ast.stmt) -> int:
    """Return the last line of what a statement evaluates itself."""
    return max(
        (getattr(head, "end_lineno", None) or statement.lineno for head in _head(statement)),
        default=statement.lineno,
    )


def _place_of(line: CodeLine) -> _Statement | None:
    """Return the statement of a line; None if its file is not what ran."""
    try:
        text = Path(line.file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = tuple(text.splitlines())
    tree = _parse(text)
    if tree is None or not 0 < line.line <= len(lines):
        return None
    if line.text.strip() not in lines[line.line - 1]:
        return None
    scopes: list[Scope] = [tree]
    scopes += [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line.line <= (node.end_lineno or 0)
    ]
    scope = max(scopes, key=lambda own: getattr(own, "lineno", 0))
    around = [own for own in _statements(scope) if own.lineno <= line.line]
    around = [own for own in around if line.line <= (own.end_lineno or 0)]
    return _Statement(around[-1], scope, line.file, lines) if around else None


@lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
