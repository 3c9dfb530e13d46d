"""Puts definitions of the old version of a module into the text of the new one.

The text is compiled as the new module, so that the old functions run with its globals, closures,
decorators and registries. What they name and the new module has not is taken along.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
from collections.abc import Collection
from functools import cached_property
from typing import NamedTuple

from otel_torch.bisecting.versions.definitions import (
    changed_definitions,
    definitions_of,
    first_line,
    statements,
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
        self._texts = old, new
        self._lines = old.split("\n"), new.split("\n")
        self.definitions = definitions_of(old), definitions_of(new)
        self.changes = changed_definitions(*self.definitions)

    @cached_property
    def _bound(self) -> tuple[dict[str, str], dict[str, str]]:
        return _bindings(self._texts[0]), _bindings(self._texts[1])

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
            return self._texts[0]
        # a method is exchanged with its class
        single = [x for x in sorted(names) if not any(x.startswith(f"{own}.") for own in names)]
        edits = [self._edit(name) for name in single]
        if helpers := self._helpers([edit.text for edit in edits]):
            begin = min(min(edit.first, edit.last) for edit in edits)
            # before the statement of the module that holds the first edit, with its decorators
            first = max(x for x in map(first_line, ast.parse(self._texts[1]).body) if x <= begin)
            edits.append(_Edit(first, first - 1, "\n".join(helpers)))
        lines = list(self._lines[1])
        for edit in sorted(edits, reverse=True):
            lines[edit.first - 1 : edit.last] = edit.text.split("\n")
        text = "\n".join(lines)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise DoesNotFit(f"what results is no Python: {error.msg}") from None
        return text

    def text_of(self, name: str, side: int) -> str:
        """Return the text of a definition in the old (0) or the new (1) version; empty without."""
        if name == WHOLE_MODULE:
            return self._texts[side]
        definition = self.definitions[side].get(name)
        if definition is None:
            return ""
        return "\n".join(self._lines[side][definition.first - 1 : definition.last])

    def _edit(self, name: str) -> _Edit:
        old, new = (own.get(name) for own in self.definitions)
        text = self.text_of(name, 0)
        if new is None:
            assert old is not None
            owner = self.definitions[1][old.owner]
            members = [x.indent for x in self.definitions[1].values() if x.owner == old.owner]
            text = _indented(text, min(members, default=owner.indent + 4))
            return _Edit(owner.last + 1, owner.last, text)
        if old is None:
            text = f"{' ' * new.indent}pass"
        elif old.indent != new.indent:
            text = _indented(text, new.indent)
        return _Edit(new.first, new.last, text)

    def _helpers(self, texts: list[str]) -> list[str]:
        """Return statements of the old module for names that the new one has not."""
        available, bound = self._bound
        helpers: dict[str, str] = {}

        def add(text: str) -> None:
            computing = _names_read(ast.unparse(without_annotations(ast.parse(text))))
            for name in _names_read(text):
                if name in bound or name in helpers or hasattr(builtins, name):
                    continue
                if name not in computing:
                    helpers[name] = f"{name} = object"  # anything will do for an annotation
                elif name in available:
                    helpers[name] = ""  # it may name itself
                    add(available[name])
                    del helpers[name]  # what it needs comes before it
                    helpers[name] = available[name]
                elif not ("*" in bound or name.startswith("__")):
                    raise DoesNotFit(f"the new module has no {name}")

        for text in texts:
            add(f"class _:\n{text}" if text[0].isspace() else text)
        return list(helpers.values())


class _Edit(NamedTuple):
    """Lines that are replaced; none where `last` is before `first`."""

    first: int
    last: int
    text: str


def _indented(text: str, columns: int) -> str:
    return textwrap.indent(textwrap.dedent(text), " " * columns)


def _bindings(source: str) -> dict[str, str]:
    """Return what a module binds, by name: the statement, of an import only what binds that name.

    The name `*` is there where it imports all of another module.
    """
    names: dict[str, str] = {}
    for node in statements(ast.parse(source).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            every, node.names = node.names, []
            for alias in every:
                node.names[:] = [alias]
                names.setdefault(alias.asname or alias.name.partition(".")[0], ast.unparse(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.setdefault(node.name, ast.unparse(node))
        else:
            for own in ast.walk(node):
                if isinstance(own, ast.Name) and isinstance(own.ctx, ast.Store):
                    names.setdefault(own.id, ast.unparse(node))
    return names


def _names_read(text: str) -> list[str]:
    """Return the names that a text reads and does not bind itself, in order."""
    top = symtable.symtable(text, "", "exec")
    tables = [top]
    for table in tables:  # which grow meanwhile
        tables += table.get_children()
    bound = {own.get_name() for own in top.get_symbols() if own.is_assigned() or own.is_imported()}
    symbols = [own for table in tables for own in table.get_symbols()]
    read = [own.get_name() for own in symbols if own.is_referenced() and own.is_global()]
    return [name for name in dict.fromkeys(read) if name not in bound]
