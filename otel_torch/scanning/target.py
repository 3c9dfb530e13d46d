"""Load what the command scans, a model and its inputs: by a name in a program, or from a folder
with a configuration.

Weights are neither needed nor loaded: models are built on the meta device, which has no memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from otel_torch.scanning.model_folder import build_from_folder, build_on_meta, call_user_code

_INPUT = re.compile(r"([A-Za-z_]\w*)=(scalar|\d+(?:[x,]\d+)*)(?::(\w+))?")

ScanTarget = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def load_target(
    target: str, component: str | None, method: str | None, inputs: Sequence[str]
) -> ScanTarget:
    """Return the callable to scan, its positional and its named arguments.

    Args:
        target, component, method, inputs: The arguments of `otel-torch scan`.

    Raises:
        ValueError: They cannot be used; the message is one line.
    """
    parsed_inputs = [_parse_input(text) for text in inputs]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if os.path.isdir(target):
        model = build_from_folder(target, component)
        function = _get_method(model, method)
        if not parsed_inputs and method is None:
            kwargs = _dummy_inputs(model)
    else:
        if component is not None:
            raise ValueError(
                f"--component is for the folder of a pipeline, and {target} is not a folder"
            )
        model, args, kwargs = _load_from_program(target)
        function = _get_method(model, method)
    weight_dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    default_dtype = next(weight_dtypes, torch.get_default_dtype())
    made = {
        name: _make_input(name, shape, dtype, default_dtype) for name, shape, dtype in parsed_inputs
    }
    kwargs = {**kwargs, **made}
    _check_arguments(function, args, kwargs, model)
    return function, args, kwargs


def _get_method(model: nn.Module, name: str | None) -> Callable[..., Any]:
    if name is None:
        return model
    method = getattr(model, name, None)
    if not inspect.ismethod(method):
        raise ValueError(f"--method {name}: {type(model).__name__} has no such method")
    return method


# -- inputs


def _parse_input(text: str) -> tuple[str, tuple[int, ...], torch.dtype | None]:
    """Parse one `--input` into name, shape and dtype.

    >>> _parse_input("x=1x4x32:bfloat16"), _parse_input("t=scalar")
    (('x', (1, 4, 32), torch.bfloat16), ('t', (), None))
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"--input {text!r}: use NAME=SHAPE[:DTYPE], for example "
            "hidden_states=1x16x32x32:bfloat16 or t=scalar"
        )
    name, size_text, dtype_name = match.groups()
    dtype = getattr(torch, dtype_name, None) if dtype_name else None
    if dtype_name and not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"--input {text!r}: {dtype_name} is not a torch dtype; use float32, bfloat16, int64, "
            "bool or another"
        )
    shape = () if size_text == "scalar" else tuple(map(int, re.split("[x,]", size_text)))
    return name, shape, dtype


def _make_input(
    name: str, shape: tuple[int, ...], dtype: torch.dtype | None, default_dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor without memory; of one element, a zero, which a forward may read."""
    if dtype is None:
        is_ids = name == "ids" or name.endswith("_ids")
        dtype = torch.int64 if is_ids else default_dtype
    if math.prod(shape) == 1:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.empty(shape, dtype=dtype, device="meta")


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> None:
    """Raise ValueError if arguments are missing or unknown, with the options that would fix it."""
    signature = inspect.signature(model.forward if function is model else function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        required = [
            f"--input {parameter.name}=SHAPE"
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        raise ValueError(
            f"{type(model).__name__}: {error}; it needs {' '.join(required) or 'no input'} "
            f"and takes {', '.join(signature.parameters)}"
        ) from None


def _dummy_inputs(model: nn.Module) -> dict[str, Any]:
    """Return the inputs that the library provides for trying the model, restricted to those that
    its forward takes; none if the main input is missing.
    """
    try:
        dummy_inputs = dict(getattr(model, "dummy_inputs", {}))
    except Exception:
        return {}
    main_input = getattr(model, "main_input_name", None)
    if main_input is not None and main_input not in dummy_inputs:
        return {}
    parameters = inspect.signature(model.forward).parameters
    return {name: dummy_inputs[name] for name in parameters if name in dummy_inputs}


# -- a name in a program


def _load_from_program(target: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    source, _, name = target.rpartition(":")
    if not source or not name:
        problem = "no such folder, and no" if os.sep in target else "no"
        raise ValueError(
            f"{target}: {problem} TARGET of the form package.module:name or file.py:name; "
            "see otel-torch scan --help"
        )
    value: Any = _import_source(source)
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{target}: {source} has no {name}")
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        return value, (), {}
    if isinstance(value, type) and issubclass(value, nn.Module):
        return build_on_meta(value, value.__name__), (), {}
    if not callable(value):
        raise ValueError(
            f"{target} is {_with_article(value)}, not a model or a function that returns one"
        )
    return _unpack_result(call_user_code(value, target), target)


def _unpack_result(result: Any, target: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return model, args and kwargs from what a function of the user has returned."""
    parts = result if isinstance(result, tuple) else (result,)
    if not isinstance(parts[0] if parts else None, nn.Module) or len(parts) > 3:
        raise ValueError(
            f"{target} returned {_with_article(result)}; "
            "it must return a model, (model, args) or (model, args, kwargs)"
        )
    args = parts[1] if len(parts) > 1 else ()
    kwargs = parts[2] if len(parts) > 2 else {}
    if isinstance(args, Mapping) and len(parts) == 2:
        args, kwargs = (), args
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f"{target} returned {_with_article(kwargs)} in place of the named arguments"
        )
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return parts[0], args, dict(kwargs)


def _import_source(source: str) -> Any:
    """Import a module by its name or by the path of its file, as the program itself would."""
    if source.endswith(".py") and not os.path.isfile(source):
        raise ValueError(f"{source}: no such file")
    try:
        if source.endswith(".py"):
            return _import_file(source)
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        raise ValueError(f"{source} cannot be imported: {type(error).__name__}: {error}") from None


def _import_file(path: str) -> Any:
    name = os.path.basename(path)[:-3]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _with_article(value: Any) -> str:
    noun = type(value).__name__
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
