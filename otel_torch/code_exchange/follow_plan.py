"""Follows a plan in a child, before its first line runs. No installed file is changed.

Raises where it cannot: a run that exchanges nothing would prove the wrong thing.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from otel_torch.code_exchange.executed_functions import note_executed
from otel_torch.code_exchange.plan import read_plan
from otel_torch.process.import_hooks import after_import


def follow_plan(file: str) -> None:
    """Exchange sources, set attributes, and note the functions that run."""
    plan = read_plan(file)
    if plan.sources:
        _exchange_sources(plan.sources)
    if plan.attributes:
        after_import("torch", lambda torch: _set_attributes(torch, plan.attributes))
    if plan.executed is not None:
        note_executed(plan.watched, plan.executed)


def _exchange_sources(sources: Mapping[str, str]) -> None:
    """Have modules compiled from other files; all else of them, such as `__file__`, stays."""
    get_code: Any = SourceFileLoader.get_code

    def exchanged(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = loader.get_filename(name)
        source = sources.get(os.path.realpath(path))
        if source is None:
            code: CodeType | None = get_code(loader, name)
            return code
        with open(source, "rb") as stream:
            return compile(stream.read(), source, "exec", dont_inherit=True)

    setattr(SourceFileLoader, "get_code", exchanged)  # noqa: B010 - it is a method, to mypy


def _set_attributes(torch: Any, attributes: Mapping[str, str]) -> None:
    for name, text in attributes.items():
        _, *owners, last = name.split(".")
        owner = torch
        for part in owners:
            owner = getattr(owner, part)
        value = _parse_value(torch, text)
        if callable(getattr(owner, last)):
            getattr(owner, last)(value)
        else:
            setattr(owner, last, value)


def _parse_value(torch: Any, text: str) -> Any:
    """Return a literal of Python, something of torch such as `torch.float64`, or the text."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
