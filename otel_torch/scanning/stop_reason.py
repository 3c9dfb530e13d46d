"""Describe in one line where and why a forward on fake tensors stopped."""

from __future__ import annotations

import linecache
import os
from types import TracebackType

import torch

# the errors of fake tensors that need a value, by class name (most classes are private)
_REASONS = {
    "GuardOnDataDependentSymNode": "what comes next depends on the data",
    "UserError": "what comes next depends on the data",
    "DataDependentOutputException": "a value of a tensor is asked for",
    "DynamicOutputShapeException": "the size of a result depends on the data",
    "UnsupportedOperatorException": "an operator has no version for fake tensors",
    "UnsupportedFakeTensorException": "a tensor of this kind has no fake version",
}
# the messages of those without a class
_MESSAGES = (
    ".numpy() is not supported",
    "Cannot access data pointer",
    "on a meta tensor",
    "fake tensor",
    "FakeTensor",
)
_MAX_STATEMENT = 100


def needs_value(error: BaseException) -> bool:
    """Return whether the error arose because a fake tensor has no values: a real run would not
    raise it.
    """
    if type(error).__name__ in _REASONS:
        return True
    return any(message in str(error) for message in _MESSAGES)


def describe_stop(error: Exception, module: str) -> str:
    """Return one line: the module, the line of the program, and the reason.

    Args:
        module: The module that was running, or an empty text.
    """
    position = f"in {module}" if module else ""
    parts = (position, _describe_line(error.__traceback__), _describe_reason(error))
    return ", ".join(part for part in parts if part)


def _describe_reason(error: Exception) -> str:
    class_name = type(error).__name__
    reason = _REASONS.get(class_name, "")
    if not reason and needs_value(error):
        reason = "a value of a tensor is asked for"
    if reason and not class_name.startswith("Unsupported"):
        return reason
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{reason} ({message})" if reason else f"{class_name}: {message}"


def _describe_line(traceback: TracebackType | None) -> str:
    """Return the innermost line that belongs neither to torch nor to this package."""
    excluded = (
        os.path.dirname(torch.__file__) + os.sep,
        os.path.dirname(os.path.dirname(__file__)) + os.sep,
    )
    line = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(excluded):
            line = f"at {os.path.basename(file)}:{traceback.tb_lineno}"
            statement = _read_statement(file, traceback.tb_lineno)
            if statement:
                line += f" `{statement}`"
        traceback = traceback.tb_next
    return line


def _read_statement(file: str, line: int) -> str:
    """Return the source line, joined with the following ones while a parenthesis is open and the
    text is short.
    """
    text = linecache.getline(file, line).strip()
    while text.count("(") > text.count(")") and len(text) < _MAX_STATEMENT:
        line += 1
        following = linecache.getline(file, line).strip()
        if not following:
            break
        text += following if text.endswith("(") else f" {following}"
    return text
