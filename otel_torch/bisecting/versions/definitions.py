"""The definitions in a module, and those that differ between two versions of it.

Two definitions are compared as syntax trees: comments, formatting, docstrings and annotations of
functions change no number.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ChangeKind = Literal["changed", "removed", "added"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A statement that binds a name, in a module or in a class.

    Attributes:
        name: As `__qualname__` has it; of several of one name, all but the first have a number.
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


@dataclass(frozen=True, slots=True)
class DefinitionChange:
    """A definition that differs between two versions of a module; None where it does not exist."""

    name: str
    old: Definition | None
    new: Definition | None

    @property
    def kind(self) -> ChangeKind:
        """What became of it."""
        if self.old is None:
            return "added"
        return "removed" if self.new is None else "changed"

    @property
    def known(self) -> Definition:
        """The new definition, else the old one."""
        definition = self.new or self.old
        assert definition is not None
        return definition


def changed_definitions(old: str, new: str) -> list[DefinitionChange]:
    """Return what differs between two versions of a module.

    Of a class each method and attribute is a definition, and the class is one where its decorators
    or bases differ. What only one version of a module defines changes nothing by itself, but a
    method that only one version of a class has overrides another.

    Raises:
        SyntaxError: One of them is no Python.

    >>> old = "def f(x):\\n    return x + 1\\ndef g(x):\\n    return x"
    >>> new = "def f(x):\\n    # more\\n    return x + 2\\ndef g(x: int):\\n    return x"
    >>> [(change.name, change.kind) for change in changed_definitions(old, new)]
    [('f', 'changed')]
    """
    before, after = definitions_of(old), definitions_of(new)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        change = DefinitionChange(name, before.get(name), after.get(name))
        if change.old is None or change.new is None:
            owner = change.known.owner
            if owner in before and owner in after:
                changes.append(change)
        elif change.old.meaning != change.new.meaning:
            changes.append(change)
    return changes


def definitions_of(source: str) -> dict[str, Definition]:
    """Return what a module defines, by name, in order.

    Raises:
        SyntaxError: It is no Python.
    """
    tree = without_annotations(ast.parse(source))
    counts: Counter[str] = Counter()
    definitions = {}
    for definition in _definitions(tree.body, ""):
        counts[definition.name] += 1
        number = counts[definition.name]
        name = definition.name if number == 1 else f"{definition.name}#{number}"
        definitions[name] = definition
    return definitions


def _definitions(body: list[ast.stmt], owner: str) -> Iterator[Definition]:
    prefix = f"{owner}." if owner else ""
    for node in body:
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
        else:
            for block in inner_blocks(node):
                yield from _definitions(block, owner)


def without_annotations(tree: ast.Module) -> ast.Module:
    """Take docstrings, and annotations of functions, out of a tree; return it."""
    plain: ast.Module = _Plain().visit(tree)
    return plain


def first_line(node: ast.stmt) -> int:
    """Return the first line of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(own.lineno for own in decorators)])


def inner_blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a statement such as `if` and `try`, which open no scope."""
    if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
        for field in ("body", "orelse", "finalbody"):
            yield getattr(node, field, [])
        for handler in getattr(node, "handlers", ()):
            yield handler.body


class _Plain(ast.NodeTransformer):
    """Leaves out what changes no number: docstrings, and annotations of functions."""

    def __init__(self) -> None:
        self._depth = 0  # of functions

    def _visit_function(self, node: _Function) -> ast.AST:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in filter(None, [*every, arguments.vararg, arguments.kwarg]):
            argument.annotation = None
        node.returns = None
        node.body = _without_docstring(node.body)
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = _without_docstring(node.body)
        # the names of fields of a dataclass are read from annotations
        depth, self._depth = self._depth, 0
        self.generic_visit(node)
        self._depth = depth
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if not self._depth:
            return node
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if not is_docstring or not isinstance(first.value.value, str):  # type: ignore[attr-defined]
        return body
    return body[1:] or [ast.copy_location(ast.Pass(), first)]
