"""Build the model that a local folder of transformers or diffusers configures, without weights."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def build_from_folder(folder: str, component: str | None) -> nn.Module:
    """Build the model of a folder, or one component of a pipeline's folder. No code in the folder
    is run. Raises ValueError, in one line.
    """
    pipeline = _read_json(os.path.join(folder, "model_index.json"))
    if pipeline is not None:
        return _build_component(folder, pipeline, component)
    if component is not None:
        raise ValueError(f"--component: {folder} has no model_index.json, so it is not a pipeline")
    config = _read_json(os.path.join(folder, "config.json"))
    if config is None:
        raise ValueError(f"{folder} has neither model_index.json nor config.json")
    if "_class_name" in config:
        return _build_configured(folder, "diffusers", config["_class_name"])
    class_names = config.get("architectures") or [None]
    return _build_configured(folder, "transformers", class_names[0])


def _build_component(folder: str, pipeline: dict[str, Any], component: str | None) -> nn.Module:
    components = {}
    for name, entry in pipeline.items():
        is_component = isinstance(entry, list) and len(entry) == 2 and all(entry)
        if is_component and os.path.isfile(os.path.join(folder, name, "config.json")):
            components[name] = entry
    if component not in components:
        problem = "choose one of its models"
        if component is not None:
            problem = f"it has no model {component!r}"
        choices = ", ".join(components) or "a component that has a config.json"
        raise ValueError(f"{folder} is a pipeline: {problem}; use --component with {choices}")
    library, class_name = components[component]
    return _build_configured(os.path.join(folder, component), library, class_name)


def _build_configured(folder: str, library: str, class_name: str | None) -> nn.Module:
    if library not in ("diffusers", "transformers"):
        raise ValueError(
            f"{folder}: a model of {library} cannot be built from its configuration; "
            "use package.module:name"
        )
    try:
        module: Any = importlib.import_module(library)
    except ImportError:
        raise ValueError(f"{folder} is a model of {library}, which is not installed") from None
    try:
        if library == "transformers":
            config = module.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model_class = getattr(module, class_name) if class_name else module.AutoModel
            build = model_class._from_config if class_name else model_class.from_config
        else:
            model_class = getattr(module, class_name or "")
            config = model_class.load_config(folder, local_files_only=True)
            build = model_class.from_config
    except AttributeError:
        raise ValueError(f"{folder}: the installed {library} has no class {class_name}") from None
    except Exception as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{folder}: {library} cannot read its configuration: {message}") from None
    return build_on_meta(lambda: build(config), class_name or library).eval()


def build_on_meta(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """Build a model on the meta device, or in memory if its constructor needs values."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:
        model: nn.Module = call_user_code(build, name)
        return model


def call_user_code(function: Callable[[], Any], name: str) -> Any:
    """Call a function of the user's program. Raises ValueError, in one line, if it fails."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{name}() failed: {type(error).__name__}: {error}") from None


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content
