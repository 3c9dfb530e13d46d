"""The definitions in a module, and those that differ between two versions of it.

Two definitions are compared as syntax trees: comments, formatting, docstrings and annotations of
functions change no number.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A statement that binds a name, in a module or in a class.

    Attributes:
        name: As `__qualname__` has it.
        owner: The class that holds it; empty in a module.
        first, last: Its lines from 1, with decorators.
        indent: Columns before it.
        kind: What it is.
        meaning: What is compared. Of a class its decorators and bases only.
    """

    name: str
    owner: str
    first: int
    last: int
    indent: int
    kind: Literal["function", "class", "value"]
    meaning: str


def changed_definitions(
    old: Mapping[str, Definition], new: Mapping[str, Definition]
) -> dict[str, Definition]:
    """Return what differs between two versions of a module: the new definition, else the old one.

    What only one version of a module defines changes nothing by itself, but a method that only one
    version of a class has overrides another.

    >>> old = definitions_of("def f(x):\\n    return x + 1\\ndef g(x):\\n    return x")
    >>> new = definitions_of("def f(x):\\n    return x + 2\\ndef g(x: int):\\n    return x")
    >>> list(changed_definitions(old, new))
    ['f']
    """
    every = {**old, **new}
    return {
        name: own
        for name, own in every.items()
        if (
            old[name].meaning != new[name].meaning
            if name in old and name in new
            else own.owner in old and own.owner in new
        )
    }


def definitions_of(source: str) -> dict[str, Definition]:
    """Return what a module and its classes define, by name, in order.

    Of several of one name, all but the first have a number.

    Raises:
        SyntaxError: It is no Python.
    """
    counts: Counter[str] = Counter()
    definitions = {}
    for definition in _definitions(without_annotations(ast.parse(source)).body, ""):
        counts[definition.name] += 1
        number = counts[definition.name]
        name = definition.name if number == 1 else f"{definition.name}#{number}"
        definitions[name] = definition
    return definitions


def _definitions(body: list[ast.stmt], owner: str) -> Iterator[Definition]:
    prefix = f"{owner}." if owner else ""
    for node in statements(body):
        first = first_line(node)
        place = (owner, first, node.end_lineno or first, node.col_offset)
        if isinstance(node, _Function):
            yield Definition(prefix + node.name, *place, "function", ast.dump(node))
        elif isinstance(node, ast.ClassDef):
            header = [*node.decorator_list, *node.bases, *node.keywords]
            meaning = " ".join(map(ast.dump, header))
            yield Definition(prefix + node.name, *place, "class", meaning)
            yield from _definitions(node.body, prefix + node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = ", ".join(map(ast.unparse, targets))
            if name != "__all__":
                yield Definition(prefix + name, *place, "value", ast.dump(node))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, of blocks such as `if` and `try` what is in them."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            handlers = [own.body for own in getattr(node, "handlers", ())]
            others = [getattr(node, field, []) for field in ("orelse", "finalbody")]
            for block in (node.body, *handlers, *others):
                yield from statements(block)
        else:
            yield node


def first_line(node: ast.stmt) -> int:
    """Return the first line of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(own.lineno for own in decorators)])


def without_annotations(tree: ast.Module) -> ast.Module:
    """Take docstrings, and annotations of functions, out of a tree; return it."""
    plain: ast.Module = ast.fix_missing_locations(_Plain().visit(tree))
    return plain


class _Plain(ast.NodeTransformer):
    """Leaves out what changes no number: docstrings, and annotations of functions."""

    _is_in_function = False

    def _visit_scope(self, node: _Function | ast.ClassDef) -> ast.AST:
        match node.body[0]:
            case ast.Expr(ast.Constant(str())):
                node.body = node.body[1:] or [ast.Pass()]
        around = self._is_in_function
        self._is_in_function = isinstance(node, _Function)
        self.generic_visit(node)
        self._is_in_function = around
        return node

    visit_ClassDef = _visit_scope

    def visit_FunctionDef(self, node: _Function) -> ast.AST:
        node.returns = None
        return self._visit_scope(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if not self._is_in_function:  # the names of fields of a dataclass are read from these
            return node
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
