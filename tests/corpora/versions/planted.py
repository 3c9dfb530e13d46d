"""Faults planted by a machine: one changed function among harmless changes of others."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class PlantedFault:
    """A function that computes something else, and what was changed in it."""

    file: str
    name: str
    what: str


def plant(
    package: Path, ran: Sequence[tuple[str, str]], harmless: int, draw: random.Random
) -> PlantedFault:
    """Change a copy of a package: one function for worse, others without effect.

    Args:
        package: The folder that holds the package's folder.
        ran: Functions that the program runs, as file below that folder and qualified name.
        harmless: How many functions are changed without effect.

    Raises:
        LookupError: No function that ran can be changed.
    """
    trees = {file: ast.parse((package / file).read_text()) for file in sorted({f for f, _ in ran})}
    functions = {
        (file, name): node
        for file, tree in trees.items()
        for name, node in _functions(tree.body, "")
        if (file, name) in set(ran)
    }
    changeable = [place for place in functions if any(_faults(functions[place]))]
    if not changeable:
        raise LookupError("no function that ran can be changed")
    place = draw.choice(changeable)
    change = draw.choice(list(_faults(functions[place])))
    others = [own for own in functions if own != place]
    for number, own in enumerate(draw.sample(others, min(harmless, len(others)))):
        draw.choice(_HARMLESS)(functions[own], number)
    what = change()
    for file, tree in trees.items():
        (package / file).write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    return PlantedFault(*place, what)


def _functions(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            # compiled from its text by torch, or a second one of its name
            if not any(
                word in ast.unparse(own)
                for own in node.decorator_list
                for word in ("jit", "setter", "overload", "register_notrace")
            ):
                yield f"{owner}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}{node.name}.")


# -- faults

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def _faults(function: Function) -> Iterator[Callable[[], str]]:
    """Yield changes of a function that may change what it computes."""
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                yield _change(node, "op", _OPERATORS[type(node.op)]())
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
                yield _change(node, "ops", [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield _change(node, "value", node.value * 1.25 if node.value else 1)
            elif isinstance(node, ast.IfExp):
                yield _change(node, "test", ast.UnaryOp(ast.Not(), node.test))
            elif isinstance(node, ast.keyword) and _is_flag(node.value):
                yield _change(node.value, "value", not ast.literal_eval(node.value))


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _change(node: ast.AST, field: str, value: object) -> Callable[[], str]:
    def change() -> str:
        before = ast.unparse(node)
        setattr(node, field, value)
        return f"{before} → {ast.unparse(node)}"

    return change


# -- changes without effect


def _begin(function: Function) -> int:
    """Return where statements may be put: behind a docstring."""
    first = function.body[0]
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))


def _bind_a_name(function: Function, number: int) -> None:
    function.body[_begin(function) : _begin(function)] = ast.parse(f"_unused = {number}").body


def _ask_nothing(function: Function, number: int) -> None:
    begin = _begin(function)
    function.body[begin:] = [ast.If(ast.Constant(True), function.body[begin:] or [ast.Pass()], [])]


def _name_the_result(function: Function, number: int) -> None:
    last = function.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        return _bind_a_name(function, number)
    name = ast.Name("_result", ast.Store())
    function.body[-1:] = [
        ast.Assign([name], last.value),
        ast.Return(ast.Name("_result", ast.Load())),
    ]
    return None


def _assert_nothing(function: Function, number: int) -> None:
    function.body[_begin(function) : _begin(function)] = ast.parse(f"assert {number} >= 0").body


_HARMLESS = (_bind_a_name, _ask_nothing, _name_the_result, _assert_nothing)
