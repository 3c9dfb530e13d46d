"""Facts about libraries, hardware and torch's settings that change the numbers of a run.

The metadata holds them, so that `otel-torch diff` can say what differs between two runs of a
program before it says where their numbers differ.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

# libraries whose version is recorded, if the program has imported them
_LIBRARIES = (
    "torch",
    "numpy",
    "accelerate",
    "bitsandbytes",
    "deepspeed",
    "diffusers",
    "fastvideo",
    "flash_attn",
    "lightning",
    "megatron.core",
    "peft",
    "torchao",
    "torchvision",
    "transformer_engine",
    "transformers",
    "triton",
    "vllm",
    "xformers",
)

# environment variables that choose kernels or the order of a sum; none of them holds a secret
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "FASTVIDEO_ATTENTION_BACKEND",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTHONHASHSEED",
    "PYTORCH_NATIVE_INNER_TREE",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_BATCH_INVARIANT",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_NUMERICS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_DISABLE_NATIVE_JIT",
    "TORCH_NATIVE_INNER_TREE",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
)

# settings of the compiler, if the program has loaded it; `deterministic` follows that of torch
_INDUCTOR = (
    "batch_invariant",
    "emulate_precision_casts",
    "fallback_random",
    "freezing",
    "max_autotune",
    "numerics",
)

Fact = str | int | bool

_SETTINGS: dict[str, Callable[[], Fact]] = {
    "threads": torch.get_num_threads,
    "default_dtype": lambda: str(torch.get_default_dtype()),
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    # `get_float32_matmul_precision` warns in older versions
    "matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cpu.capability": torch.backends.cpu.get_cpu_capability,
    "mkldnn": lambda: bool(torch.backends.mkldnn.enabled),
    "mkldnn.fp32_precision": lambda: torch.backends.mkldnn.fp32_precision,
    "sdpa.flash": torch.backends.cuda.flash_sdp_enabled,
    "sdpa.mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "sdpa.math": torch.backends.cuda.math_sdp_enabled,
    "sdpa.cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}
# where the program uses a CUDA device: reading them earlier could initialize it
_CUDA_SETTINGS: dict[str, Callable[[], Fact]] = {
    "device": lambda: torch.cuda.get_device_name(),
    "cuda": lambda: str(torch.version.cuda or torch.version.hip),
    "cuda.bf16_reduced_precision": lambda: str(
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cuda.fp16_reduced_precision": lambda: str(
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cudnn": lambda: torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
    "cudnn.benchmark": lambda: bool(torch.backends.cudnn.benchmark),
    "cudnn.deterministic": lambda: bool(torch.backends.cudnn.deterministic),
    "cudnn.fp32_precision": lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
}


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that are imported."""
    imported = {
        "python": platform.python_version(),
        "otel_torch": importlib.import_module("otel_torch").__version__,
    }
    for name in _LIBRARIES:
        if (module := sys.modules.get(name)) is not None:
            imported[name] = str(getattr(module, "__version__", ""))
    return imported


def describe_environment() -> dict[str, Fact]:
    """Return what may change the numbers of the same program, by name.

    A fact that this version of torch does not have is left out. An unset variable is left out, too.
    """
    facts: dict[str, Fact] = {"machine": platform.machine()}
    tables = [_SETTINGS]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tables.append(_CUDA_SETTINGS)
    for table in tables:
        for name, read in table.items():
            with suppress(Exception):
                facts[name] = read()
    inductor = sys.modules.get("torch._inductor.config")
    for name in _INDUCTOR:
        if isinstance(value := getattr(inductor, name, None), bool | str):
            facts[f"inductor.{name}"] = value
    return facts | {name: os.environ[name] for name in VARIABLES if name in os.environ}
