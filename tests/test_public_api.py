"""The public names have the signatures that `tests/public_api.txt` lists.

What stands there is promised (docs/promises.md). After an intended change, write the list anew with
`python -m tests.test_public_api` and name the change in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import otel_torch

LIST = Path(__file__).with_suffix("").with_name("public_api.txt")


def parameters(function: object) -> str:
    """Return parameters with their defaults, without types: these say more with each version."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r"<[^=]* at 0x\w+>", "<function>", text)


def members(kind: type) -> Iterator[str]:
    """Yield the public methods and properties that a class has from this package."""
    for name in sorted(dir(kind)):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if name.startswith("_") or not owner.__module__.startswith("otel_torch"):
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        yield f"{name}{parameters(member) if inspect.isfunction(member) else ''}"


def described() -> str:
    """Return a line for each public name and each public member of a class."""
    found = []
    for name in sorted(otel_torch.__all__):
        value = getattr(otel_torch, name)
        if inspect.isclass(value):
            arguments = parameters(value.__init__) if "__init__" in vars(value) else ""
            found.append(f"class {name}{arguments}")
            found += [f"  {member}" for member in members(value)]
        else:
            found.append(f"{name}{parameters(value) if inspect.isroutine(value) else ''}")
    return "\n".join(found) + "\n"


def test_the_public_names_have_the_signatures_that_are_promised():
    assert described() == LIST.read_text(), "see the first lines of this file"


if __name__ == "__main__":
    LIST.write_text(described())
