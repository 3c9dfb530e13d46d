"""Puts definitions of the old version of a module into the text of the new one.

The text is compiled as the new module, so that the old functions run with its globals, closures,
decorators and registries. What they name and the new module has not is taken along.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from otel_torch.bisecting.versions.definitions import (
    Definition,
    changed_definitions,
    definitions_of,
    first_line,
    inner_blocks,
    without_annotations,
)

# the name of the unit that is a whole module
WHOLE_MODULE = ""


class DoesNotFit(Exception):
    """A definition cannot be exchanged by itself; the message says why."""


class ModuleSplice:
    """The two versions of a module, and what differs between them.

    Raises:
        SyntaxError: One of them is no Python.
    """

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new
        self._lines = old.splitlines(), new.splitlines()
        self.changes = {change.name: change for change in changed_definitions(old, new)}
        self.definitions = definitions_of(old), definitions_of(new)

    def fitting_unit(self, name: str) -> tuple[str, str | None]:
        """Return the smallest unit around a definition that fits: itself, its class, the module;
        and why a smaller one does not.
        """
        reason = None
        while any(name in own for own in self.definitions):
            try:
                self.splice({name})
            except DoesNotFit as error:
                reason = reason or f"{name}: {error}"
                name = name.rpartition(".")[0]
            else:
                return name, reason
        return WHOLE_MODULE, reason

    def splice(self, names: Collection[str]) -> str:
        """Return the new module with some definitions as the old one has them.

        Raises:
            DoesNotFit: The new module lacks what one of them needs.
        """
        if WHOLE_MODULE in names:
            return self.old
        edits, wanted = [], []
        for name in sorted(names):
            if any(name.startswith(f"{own}.") for own in names):
                continue  # its class is exchanged
            edits.append(self._edit(name))
            wanted.append(edits[-1].text)
        helpers = self._helpers("\n".join(map(textwrap.dedent, wanted)))
        if helpers:
            first = self._first_statement(min(edit.first for edit in edits))
            edits.append(_Edit(first, first - 1, "\n".join(helpers)))
        lines = list(self._lines[1])
        for edit in sorted(edits, reverse=True):
            lines[edit.first - 1 : edit.last] = edit.text.splitlines()
        text = "\n".join(lines) + "\n"
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise DoesNotFit(f"what results is no Python: {error.msg}") from None
        return text

    def text_of(self, name: str, side: int) -> str:
        """Return the text of a definition in the old (0) or the new (1) version; empty without."""
        if name == WHOLE_MODULE:
            return (self.old, self.new)[side]
        definition = self.definitions[side].get(name)
        if definition is None:
            return ""
        lines = self._lines[side][definition.first - 1 : definition.last]
        return "\n".join(lines)

    def _edit(self, name: str) -> _Edit:
        old, new = (own.get(name) for own in self.definitions)
        if new is None:
            assert old is not None
            owner = self.definitions[1][old.owner]
            indent = self._indent_inside(owner)
            return _Edit(owner.last + 1, owner.last, _indented(self.text_of(name, 0), indent))
        if old is None:
            return _Edit(new.first, new.last, f"{' ' * new.indent}pass")
        text = self.text_of(name, 0)
        return _Edit(
            new.first,
            new.last,
            text if old.indent == new.indent else _indented(text, new.indent),
        )

    def _indent_inside(self, owner: Definition) -> int:
        members = [x.indent for x in self.definitions[1].values() if x.owner == owner.name]
        return min(members, default=owner.indent + 4)

    def _first_statement(self, line: int) -> int:
        """Return where the statement of the module begins that holds a line."""
        for node in ast.parse(self.new).body:
            if (node.end_lineno or node.lineno) >= line:
                return first_line(node)
        return line

    def _helpers(self, text: str) -> list[str]:
        """Return statements of the old module for names that the new one has not."""
        bound, has_star = _bound_names(self.new)
        available, _ = _bound_names(self.old)
        helpers: dict[str, str] = {}

        def add(text: str) -> None:
            tree = ast.parse(text)
            every = _needed_names(tree)
            computing = _needed_names(without_annotations(tree))
            for name in every:
                if name in bound or name in helpers or hasattr(builtins, name):
                    continue
                if name not in computing:
                    helpers[name] = f"{name} = object"  # anything will do for an annotation
                    continue
                if name not in available:
                    if has_star or name.startswith("__"):
                        continue
                    raise DoesNotFit(f"the new module has no {name}")
                statement = available[name].text(self._lines[0])
                helpers[name] = ""  # it may name itself
                add(statement)
                del helpers[name]
                helpers[name] = statement

        add(text)
        return list(helpers.values())


class _Edit(NamedTuple):
    """Lines that are replaced; none where `last` is before `first`."""

    first: int
    last: int
    text: str


def _indented(text: str, columns: int) -> str:
    return textwrap.indent(textwrap.dedent(text), " " * columns)


class _Binding(NamedTuple):
    """A statement that binds a name in a module; of an import only what binds that name."""

    node: ast.stmt
    alone: str | None

    def text(self, lines: list[str]) -> str:
        if self.alone is not None:
            return self.alone
        return textwrap.dedent("\n".join(lines[first_line(self.node) - 1 : self.node.end_lineno]))


def _bound_names(source: str) -> tuple[Mapping[str, _Binding], bool]:
    """Return what a module binds, by name, and whether it imports all of another one."""
    names: dict[str, _Binding] = {}
    has_star = False
    for node in _module_statements(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.setdefault(node.name, _Binding(node, None))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                has_star |= alias.name == "*"
                own = alias.asname or alias.name.partition(".")[0]
                names.setdefault(own, _Binding(node, _import_alone(node, alias)))
        else:
            stored = (x for x in ast.walk(node) if isinstance(x, ast.Name))
            for target in stored:
                if isinstance(target.ctx, ast.Store):
                    names.setdefault(target.id, _Binding(node, None))
    return names, has_star


def _module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        blocks = list(inner_blocks(node))
        for block in blocks:
            yield from _module_statements(block)
        if not blocks:
            yield node


def _import_alone(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import([alias]))
    return ast.unparse(ast.ImportFrom(node.module, [alias], node.level))


def _needed_names(tree: ast.AST) -> list[str]:
    """Return the names that a text reads and does not bind itself, in order."""
    read: dict[str, None] = {}
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read[node.id] = None
            else:
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return [name for name in read if name not in bound]
