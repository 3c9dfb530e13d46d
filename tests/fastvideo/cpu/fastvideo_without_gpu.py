"""What FastVideo 0.2.1 takes for granted of a GPU, put right after each module's import, so that
its own files stay as they are. Standard library only: nothing is imported before FastVideo does it.

`BREAK_AT_FORWARD=N` makes the Nth forward of the transformer raise, as a shape error or an
exhausted device would.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _attention_and_device(platform):
    # there is no attention backend for a CPU, and the generators' device name is not one that torch
    # knows
    cpu = platform.CpuPlatform
    cpu.get_attn_backend_cls = classmethod(
        lambda cls, *args, **kwargs: "fastvideo.attention.backends.sdpa.SDPABackend"
    )
    cpu.device_name = "cpu"

    def get_torch_device(cls):
        import torch

        return torch.cuda  # asked for allocated bytes only, and answers 0

    cpu.get_torch_device = classmethod(get_torch_device)


def _local_device(parallel_state):
    import torch

    # every platform that is neither CUDA nor NPU is taken for Apple's
    parallel_state.get_local_torch_device = lambda: torch.device("cpu")
    # stages name "cuda" for autocast; switched off there, float32 embeddings would meet bfloat16
    # weights
    real = torch.autocast.__init__

    def init(self, device_type, *args, **kwargs):
        real(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init


def _device_mesh(fsdp_load):
    real = fsdp_load.init_device_mesh
    fsdp_load.init_device_mesh = lambda device, *args, **kwargs: real(
        device.replace("cuda", "cpu"), *args, **kwargs
    )


def _no_warm_up(communication_op):
    communication_op._sp_warmup_done = True  # the warm-up makes tensors on "cuda"


def _broken_forward(wanvideo):
    fatal = int(os.environ.get("BREAK_AT_FORWARD", "-1"))
    block = wanvideo.WanTransformerBlock
    forward, state = block.forward, {"forwards": -1, "first": None}

    def broken(self, *args, **kwargs):
        state["first"] = state["first"] or self
        state["forwards"] += self is state["first"]
        if state["forwards"] == fatal and self is not state["first"]:
            raise RuntimeError("the forward that was to break")
        return forward(self, *args, **kwargs)

    if fatal >= 0:
        block.forward = broken


_PATCHES = {
    "fastvideo.models.dits.wanvideo": _broken_forward,
    "fastvideo.platforms.cpu": _attention_and_device,
    "fastvideo.distributed.parallel_state": _local_device,
    "fastvideo.models.loader.fsdp_load": _device_mesh,
    "fastvideo.distributed.communication_op": _no_warm_up,
}


class _PatchingLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        _PATCHES[module.__name__](module)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        return spec and importlib.util.spec_from_file_location(
            name, spec.origin, loader=_PatchingLoader(name, spec.origin)
        )


def install():
    os.environ.setdefault("FASTVIDEO_ATTENTION_BACKEND", "TORCH_SDPA")
    sys.meta_path.insert(0, _Finder)
