"""What the command scans: a model and its inputs, from a name in a program or from a folder with a
configuration.

Weights are neither needed nor loaded: a model that is built here is built on the meta device, which
holds no memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_SHAPE = re.compile(r"([A-Za-z_]\w*)=(scalar|\d+(?:[x,]\d+)*)(?::(\w+))?")

Target = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def load(target: str, component: str | None, method: str | None, inputs: Sequence[str]) -> Target:
    """The callable to scan, its positional and its named arguments. Raises ValueError (one line)
    for what cannot be used.
    """
    given = [_read_input(text) for text in inputs]
    if os.path.isdir(target):
        model, args, kwargs = _from_folder(target, component), (), {}
        called = _method(model, method)
        if not given and method is None:
            kwargs = _usual_inputs(model)
    else:
        if component is not None:
            raise ValueError(
                f"--component is for the folder of a pipeline, and {target} is no folder"
            )
        model, args, kwargs = _from_program(target)
        called = _method(model, method)
    dtype = next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )
    kwargs = {**kwargs, **{name: _make(name, shape, kind, dtype) for name, shape, kind in given}}
    _check(called, args, kwargs, model)
    return called, args, kwargs


def _method(model: nn.Module, name: str | None) -> Callable[..., Any]:
    if name is None:
        return model
    found = getattr(model, name, None)
    if not inspect.ismethod(found):
        raise ValueError(f"--method {name}: {type(model).__name__} has no such method")
    return found


# -- inputs
# --------------------------------------------------------------------------------------------------


def _read_input(text: str) -> tuple[str, tuple[int, ...], torch.dtype | None]:
    """
    >>> _read_input("x=1x4x32:bfloat16"), _read_input("t=scalar")
    (('x', (1, 4, 32), torch.bfloat16), ('t', (), None))
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"--input {text!r}: use NAME=SHAPE[:DTYPE], for example hidden_states=1x16x32x32:bfloat16 or t=scalar"
        )
    name, shape, word = match.groups()
    dtype = getattr(torch, word, None) if word else None
    if word and not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"--input {text!r}: {word} is no torch dtype; use float32, bfloat16, int64, bool or another"
        )
    return name, () if shape == "scalar" else tuple(map(int, re.split("[x,]", shape))), dtype


def _make(
    name: str, shape: tuple[int, ...], dtype: torch.dtype | None, usual: torch.dtype
) -> torch.Tensor:
    """A tensor without memory; of a single element, zero, because a forward may ask for its value."""
    if dtype is None:
        dtype = torch.int64 if name == "ids" or name.endswith("_ids") else usual
    size = 1
    for length in shape:
        size *= length
    return (
        torch.zeros(shape, dtype=dtype, device="cpu")
        if size == 1
        else torch.empty(shape, dtype=dtype, device="meta")
    )


def _check(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> None:
    """Name the arguments that are missing or unknown, before a forward fails on them in its own
    words.
    """
    signature = inspect.signature(model.forward if called is model else called)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        needed = [
            p.name
            for p in signature.parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        known = [p.name for p in signature.parameters.values()]
        raise ValueError(
            f"{type(model).__name__}: {error}; it needs {' '.join(f'--input {name}=SHAPE' for name in needed) or 'no input'}"
            f" and takes {', '.join(known)}"
        ) from None


def _usual_inputs(model: nn.Module) -> dict[str, Any]:
    """The library's own inputs for trying a model, as far as this model takes them; none without
    its main one.
    """
    try:
        found = dict(getattr(model, "dummy_inputs", {}))
    except Exception:
        return {}
    main = getattr(model, "main_input_name", None)
    if main is not None and main not in found:
        return {}
    return {
        name: found[name] for name in inspect.signature(model.forward).parameters if name in found
    }


# -- from a program
# --------------------------------------------------------------------------------------------------


def _from_program(target: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        what = "no such folder, and no" if os.sep in target else "no"
        raise ValueError(
            f"{target}: {what} TARGET of the form package.module:name or file.py:name; see otel-torch scan --help"
        )
    found: Any = _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{target}: {place} has no {name}")
        found = getattr(found, part)
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = _build(found, found)
    elif not isinstance(found, nn.Module):
        if not callable(found):
            raise ValueError(
                f"{target} is {_article(type(found).__name__)}, not a model or a function that returns one"
            )
        found = _call(found, target)
    if isinstance(found, nn.Module):
        return found, (), {}
    parts = found if isinstance(found, tuple) else (found,)
    if not isinstance(parts[0] if parts else None, nn.Module) or len(parts) > 3:
        raise ValueError(
            f"{target} returned {_article(type(found).__name__)}; it must return a model, (model, args) or (model, args, kwargs)"
        )
    model, args, kwargs = (
        parts[0],
        parts[1] if len(parts) > 1 else (),
        parts[2] if len(parts) > 2 else {},
    )
    if isinstance(args, Mapping) and len(parts) == 2:
        args, kwargs = (), args
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f"{target} returned {_article(type(kwargs).__name__)} in place of the named arguments"
        )
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return model, args, dict(kwargs)


def _import(place: str) -> Any:
    """Import a module by name or by the path of its file, as the program itself would find it."""
    if place.endswith(".py") and not os.path.isfile(place):
        raise ValueError(f"{place}: no such file")
    try:
        if not place.endswith(".py"):
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(place)
        name = os.path.basename(place)[:-3]
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        sys.modules.setdefault(name, module)
        spec.loader.exec_module(module)
        return module
    except (
        Exception,
        SystemExit,
    ) as error:  # a script without a main guard may end the interpreter
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from None


def _call(function: Callable[..., Any], what: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{what}() failed: {type(error).__name__}: {error}") from None


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


# -- from a folder
# --------------------------------------------------------------------------------------------------


def _from_folder(folder: str, component: str | None) -> nn.Module:
    """Build the model that a folder configures. No code that lies in the folder is run."""
    pipeline = _read_json(os.path.join(folder, "model_index.json"))
    if pipeline is not None:
        parts = {
            name: entry
            for name, entry in pipeline.items()
            if isinstance(entry, list) and len(entry) == 2 and all(entry)
        }
        models = [
            name for name in parts if os.path.isfile(os.path.join(folder, name, "config.json"))
        ]
        if component not in models:
            wrong = "say which model" if component is None else f"no model {component!r}"
            raise ValueError(
                f"{folder} is a pipeline: {wrong}; use --component with {', '.join(models) or 'a part that has a config.json'}"
            )
        library, name = parts[component]
        return _configured(os.path.join(folder, component), library, name)
    if component is not None:
        raise ValueError(f"--component: {folder} has no model_index.json, so it is no pipeline")
    config = _read_json(os.path.join(folder, "config.json"))
    if config is None:
        raise ValueError(f"{folder} has neither model_index.json nor config.json")
    if "_class_name" in config:
        return _configured(folder, "diffusers", config["_class_name"])
    names = config.get("architectures") or [None]
    return _configured(folder, "transformers", names[0])


def _configured(folder: str, library: str, name: str | None) -> nn.Module:
    if library not in ("diffusers", "transformers"):
        raise ValueError(
            f"{folder}: a model of {library} cannot be built from its configuration; use package.module:name"
        )
    try:
        module: Any = importlib.import_module(library)
    except ImportError:
        raise ValueError(f"{folder} is a model of {library}, which is not installed here") from None
    try:
        if library == "transformers":
            config = module.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            cls = getattr(module, name) if name else module.AutoModel
            build = cls._from_config if name else cls.from_config
        else:
            cls = getattr(module, name or "")
            config, build = cls.load_config(folder, local_files_only=True), cls.from_config
    except AttributeError:
        raise ValueError(f"{folder}: the installed {library} has no class {name}") from None
    except Exception as error:
        raise ValueError(
            f"{folder}: {library} cannot read its configuration: {' '.join(str(error).split())}"
        ) from None
    return _build(lambda: build(config), name or library).eval()


def _build(make: Callable[[], nn.Module], what: Any) -> nn.Module:
    """Build on the meta device; a constructor that asks for numbers is built in memory."""
    name = what if isinstance(what, str) else what.__name__
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return _call(make, name)  # type: ignore[no-any-return]


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
