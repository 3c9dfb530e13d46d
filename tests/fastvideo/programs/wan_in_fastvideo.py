"""The port: FastVideo generates the same video from the same folder.  python wan_in_fastvideo.py MODEL [PRECISION [BUG]]

An ordinary script. PRECISION is that of the transformer, float32 or bfloat16; the rest is float32. BUG names a mistake to make.
Each worker imports this file again, so what is done to FastVideo on import is done there too.
"""

import sys
import types

import torch
from fastvideo import VideoGenerator
from fastvideo.configs.pipelines.wan import WanT2V480PConfig
from fastvideo.models.dits import wanvideo
from fastvideo.pipelines.stages import decoding, denoising

MODEL, PRECISION, BUG = (*sys.argv[1:], *("model", "float32", "")[len(sys.argv) - 1 :])


class InFloat32(types.ModuleType):
    """`torch`, to a stage that denoises in bfloat16 whatever it is told."""

    bfloat16 = torch.float32

    def __getattr__(self, name):
        return getattr(torch, name)


def gate():
    """The gate of each block's feed-forward is that of its self-attention."""
    forward = wanvideo.WanTransformerBlock.forward

    def wrong(self, hidden_states, encoder_hidden_states, temb, *rest):
        table = self.scale_shift_table
        swapped = torch.cat([table[:, :5], table[:, 2:3]], dim=1)
        del self.scale_shift_table
        self.scale_shift_table = torch.nn.Parameter(swapped, requires_grad=False)
        try:
            temb = torch.cat([temb[:, :5], temb[:, 2:3]], dim=1)
            return forward(self, hidden_states, encoder_hidden_states, temb, *rest)
        finally:
            self.scale_shift_table = table

    wanvideo.WanTransformerBlock.forward = wrong
