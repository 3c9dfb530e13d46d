"""NVTX ranges, which give Nsight Systems the names of the spans.

They need OTEL_TORCH_NVTX and CUDA.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from otel_torch import session
from otel_torch.process.console import say_once
from otel_torch.regions.fallback_settings import read_environment


@functools.lru_cache(maxsize=8)
def _is_set(value: str | None, fastvideo_value: str | None) -> bool:
    """Return the environment's setting; the arguments are the key of the cache."""
    return read_environment("nvtx").nvtx


def wants_nvtx() -> bool:
    """Return whether the session, or else the environment, asks for NVTX and CUDA is available."""
    current = session.current()
    if current is not None:
        is_wanted = current.settings.nvtx
    else:
        is_wanted = _is_set(
            os.environ.get("OTEL_TORCH_NVTX"), os.environ.get("FASTVIDEO_NVTX_PROFILE")
        )
    return is_wanted and torch.cuda.is_available()


class nvtx_range:
    """Push an NVTX range around a block, if OTEL_TORCH_NVTX is on and CUDA is available.

    If the block raises, the range is popped and the exception propagates.

    Examples:
        >>> with nvtx_range("vae.decode"):
        ...     pass
    """

    __slots__ = ("_pushed", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._pushed: list[bool] = []

    def __enter__(self) -> nvtx_range:
        if torch.compiler.is_compiling():
            return self
        pushed = False
        try:
            if wants_nvtx():
                nvtx: Any = torch.cuda.nvtx
                nvtx.range_push(self.name)
                pushed = True
        except Exception as error:
            _report_failure(error)
        self._pushed.append(pushed)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._pushed and self._pushed.pop():
            try:
                nvtx: Any = torch.cuda.nvtx
                nvtx.range_pop()
            except Exception as problem:
                _report_failure(problem)


def _report_failure(error: Exception) -> None:
    say_once(f"NVTX ranges do not work here: {type(error).__name__}: {error}")
