"""Pairs of versions from the package index: what a program computes differently, and why.

The functions that are right were named from the sources and change logs before the first run.
"""

from __future__ import annotations

from typing import NamedTuple


class VersionPair(NamedTuple):
    """Two versions of a package and a program.

    Attributes:
        right: The functions that make the difference, without the package; empty where the program
            computes the same with both.
    """

    name: str
    old: str
    new: str
    program: str
    right: frozenset[str]


def _calling(imports: str, call: str, inputs: str) -> str:
    """Return a program that calls a function in a module, as a model would."""
    return f"""\
import torch
{imports}

class Model(torch.nn.Module):
    def forward(self, *inputs):
        return {call}

torch.manual_seed(0)
Model()({inputs})
"""


def _training(imports: str, optimizer: str, begin: str = "") -> str:
    """Return a program that trains three steps."""
    return f"""\
import torch
{imports}

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = {optimizer}
{begin}
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
"""


def _scheduled(scheduler: str, begin: str, step: str = "") -> str:
    return f"""\
import torch
from diffusers import {scheduler.partition("(")[0]}

torch.manual_seed(0)
model = torch.nn.Conv2d(3, 3, 3, padding=1)
scheduler = {scheduler}
{begin}
sample = torch.randn(1, 3, 6, 6)
with torch.no_grad():
    for time in scheduler.timesteps:
        noise = model(sample) * torch.cos(time / 1000)
        sample = scheduler.step(noise, time, sample{step}).prev_sample
"""


_METRIC = "import torchmetrics.functional as metrics"

_TABLE = (
    ("ergas", "torchmetrics==1.3.2", "torchmetrics==1.4.3",
     _calling("import torchmetrics.functional.image as image",
              "image.error_relative_global_dimensionless_synthesis(*inputs)",
              "torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)"),
     "_ergas_compute"),
    ("no positives at all", "torchmetrics==1.3.2", "torchmetrics==1.4.3",
     _calling(_METRIC, "metrics.jaccard_index(*inputs, task='binary')",
              "torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long)"),
     "_jaccard_index_reduce"),
    ("psnr of bytes", "torchmetrics==1.4.3", "torchmetrics==1.5.2",
     _calling("import torchmetrics.functional.image as image",
              "image.peak_signal_noise_ratio(*inputs, data_range=255.0)",
              "*torch.randint(0, 256, (2, 1, 3, 8, 8), dtype=torch.uint8)"),
     "_psnr_update"),
    ("accuracy of the top 2", "torchmetrics==1.5.2", "torchmetrics==1.6.3",
     """\
import torch
from torchmetrics.classification import MulticlassPrecision

torch.manual_seed(0)
metric = MulticlassPrecision(num_classes=5, top_k=2, average="macro")
metric(torch.randn(32, 5).softmax(-1), torch.randint(0, 5, (32,)))
""",
     "_multiclass_stat_scores_update"),
    ("precision of retrieval", "torchmetrics==1.6.3", "torchmetrics==1.7.4",
     _calling("import torchmetrics.functional.retrieval as retrieval",
              "retrieval.retrieval_precision(*inputs, top_k=4)",
              "torch.tensor([0.9, 0.4, -0.1, -0.2, -0.9]), "
              "torch.tensor([True, False, True, True, False])"),
     "retrieval_precision"),
    ("no positives", "torchmetrics==1.3.2", "torchmetrics==1.4.3",
     _calling(_METRIC, "metrics.average_precision(*inputs, task='binary')",
              "torch.rand(8), torch.zeros(8, dtype=torch.long)"),
     "_binary_precision_recall_curve_compute"),
    ("difference of gaussians", "kornia==0.8.0", "kornia==0.8.1",
     _calling("from kornia.feature.responses import dog_response_single",
              "dog_response_single(inputs[0], 0.6, 2.4)", "torch.rand(1, 1, 16, 16)"),
     "dog_response_single"),
    ("distance transform", "kornia==0.8.1", "kornia==0.8.2",
     _calling("from kornia.contrib import distance_transform",
              "distance_transform(inputs[0])", "(torch.rand(1, 1, 16, 16) > 0.97).float()"),
     "distance_transform"),
    ("previous time step", "diffusers==0.31.0", "diffusers==0.32.2",
     _scheduled("DDPMScheduler(timestep_spacing='linspace')", "scheduler.set_timesteps(7)",
                ", generator=torch.Generator().manual_seed(0)"),
     "DDPMScheduler.previous_timestep"),
    ("times that are given", "diffusers==0.39.0", "diffusers==0.40.0",
     _scheduled("FlowMatchEulerDiscreteScheduler()",
                "scheduler.set_timesteps(sigmas=[1.0, 0.6, 0.3], timesteps=[900.0, 500.0, 100.0])"),
     "FlowMatchEulerDiscreteScheduler.set_timesteps"),
    ("noise of a generator", "diffusers==0.38.0", "diffusers==0.39.0",
     _scheduled("FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)",
                "scheduler.set_timesteps(3)", ", generator=torch.Generator().manual_seed(5)"),
     "FlowMatchEulerDiscreteScheduler.step"),
    ("dilated pooling", "timm==1.0.28", "timm==1.0.31",
     _calling("from timm.layers import create_pool2d",
              "create_pool2d('max', 3, stride=2, padding='same', dilation=2)(inputs[0])",
              "torch.randn(1, 2, 9, 9)"),
     "MaxPool2dSame.forward"),
    ("dropped blocks", "timm==1.0.22", "timm==1.0.24",
     _calling("from timm.layers import DropBlock2d",
              "DropBlock2d(0.3, block_size=3).train()(inputs[0])", "torch.randn(2, 4, 12, 12)"),
     "DropBlock2d.forward DropBlock2d.__init__ drop_block_2d"),
    ("asymmetric loss", "timm==1.0.28", "timm==1.0.31",
     """\
import torch
from timm.loss import AsymmetricLossMultiLabel

torch.manual_seed(0)
AsymmetricLossMultiLabel()(torch.randn(4, 6), (torch.rand(4, 6) > 0.7).float())
""",
     "AsymmetricLossMultiLabel.forward"),
    ("ignored labels", "torchmetrics==1.6.3", "torchmetrics==1.7.4",
     _calling("import torchmetrics.functional.classification as metrics",
              "metrics.multilabel_exact_match(*inputs, num_labels=3, ignore_index=-1)",
              "torch.tensor([[0.9, 0.1, 0.8], [0.2, 0.7, 0.4]]), "
              "torch.tensor([[1, 0, -1], [-1, 1, 0]])"),
     "_multilabel_exact_match_update multilabel_exact_match"),
    ("adopt", "pytorch-optimizer==3.3.4", "pytorch-optimizer==3.5.1",
     _training("from pytorch_optimizer import ADOPT", "ADOPT(model.parameters(), lr=0.1)"),
     "ADOPT.step"),
    ("exadam", "pytorch-optimizer==3.6.1", "pytorch-optimizer==3.8.2",
     _training("from pytorch_optimizer import EXAdam", "EXAdam(model.parameters(), lr=0.1)"),
     "EXAdam.step"),
    ("routed experts", "transformers==5.5.4", "transformers==5.8.1",
     """\
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

torch.manual_seed(0)
config = DeepseekV3Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8,
    n_group=4, topk_group=2, num_experts_per_tok=4, first_k_dense_replace=1, kv_lora_rank=8,
    q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=4, bos_token_id=None,
    eos_token_id=None, pad_token_id=None,
)
model = DeepseekV3ForCausalLM(config).eval()
with torch.no_grad():
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.fill_(-0.6)
    model(torch.randint(0, 32, (1, 6)))
""",
     "DeepseekV3MoE.route_tokens_to_experts"),
    ("power mean", "torch_geometric==2.7.0", "torch_geometric==2.8.1",
     """\
import torch
from torch_geometric.nn import PowerMeanAggregation

torch.manual_seed(0)
PowerMeanAggregation(p=0.5)(torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2]))
""",
     "PowerMeanAggregation.forward PowerMeanAggregation.__init__"),
    ("each of a batch by itself", "monai==1.5.2", "monai==1.6.1",
     """\
import torch
from monai.losses import GeneralizedWassersteinDiceLoss

torch.manual_seed(0)
distances = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.5], [1.0, 0.5, 0.0]])
loss = GeneralizedWassersteinDiceLoss(distances)
loss(torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4)))
""",
     "GeneralizedWassersteinDiceLoss._compute_generalized_true_positive "
     "GeneralizedWassersteinDiceLoss._compute_denominator"),
    ("mask of a loss", "monai==1.5.2", "monai==1.6.1",
     """\
import torch
from monai.losses import MaskedDiceLoss

torch.manual_seed(0)
mask = torch.ones(2, 1, 6, 6)
mask[:, :, :3] = 0
loss = MaskedDiceLoss(sigmoid=True)
loss(torch.randn(2, 1, 6, 6), (torch.rand(2, 1, 6, 6) > 0.5).float(), mask)
""",
     "MaskedDiceLoss.__init__ MaskedDiceLoss.forward"),
    ("free of a schedule", "schedulefree==1.2.7", "schedulefree==1.4.1",
     _training("from schedulefree import AdamWScheduleFree",
               "AdamWScheduleFree(model.parameters(), lr=0.1)", "optimizer.train()"),
     "AdamWScheduleFree.step"),
    ("centers of a class", "pytorch-metric-learning==2.8.1", "pytorch-metric-learning==2.9.0",
     """\
import torch
from pytorch_metric_learning.losses import SubCenterArcFaceLoss
from pytorch_metric_learning.reducers import SumReducer

torch.manual_seed(0)
loss = SubCenterArcFaceLoss(num_classes=4, embedding_size=6, reducer=SumReducer())
loss(torch.randn(8, 6), torch.randint(0, 4, (8,)))
""",
     "SubCenterArcFaceLoss.__init__"),
    ("merged and taken out", "peft==0.19.1", "peft==0.21.2",
     """\
import sys
import torch

sys.modules["torchao"] = None  # the shared one is too new for this package
from peft import IA3Config, inject_adapter_in_model

torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)

config = IA3Config(target_modules=["conv"], feedforward_modules=[], init_ia3_weights=False)
model = inject_adapter_in_model(config, Net())
model.conv.merge()
model.conv.unmerge()
model(torch.randn(1, 3, 6, 6))
""",
     "_ConvNd.unmerge"),
    ("pattern of ranks", "peft==0.14.0", "peft==0.15.2",
     """\
import sys
import torch

sys.modules["torchao"] = None  # the shared one is too new for this package
from peft import LoraConfig, inject_adapter_in_model

torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

config = LoraConfig(
    r=4, lora_alpha=4, target_modules=["first", "second"], alpha_pattern={"first": 32},
    init_lora_weights=False,
)
model = inject_adapter_in_model(config, Net())
model(torch.randn(2, 6))
""",
     "LoraModel._create_and_replace"),
    ("ranks of spearman", "torchmetrics==1.6.3", "torchmetrics==1.7.4",
     _calling(_METRIC, "metrics.spearman_corrcoef(*inputs)", "torch.randn(9), torch.randn(9)"), ""),
    ("rms norm", "timm==1.0.15", "timm==1.0.17",
     """\
import torch
from timm.layers import AttentionPoolLatent, RmsNorm2d

torch.manual_seed(0)
x = RmsNorm2d(8)(torch.randn(2, 8, 4, 4))
AttentionPoolLatent(8, num_heads=2)(x.flatten(2).transpose(1, 2))
""", ""),
    ("unipc", "diffusers==0.37.1", "diffusers==0.38.0",
     _scheduled("UniPCMultistepScheduler()", "scheduler.set_timesteps(4)"), ""),
    ("denormalize", "kornia==0.8.1", "kornia==0.8.2",
     _calling("from kornia.enhance import denormalize",
              "denormalize(inputs[0], torch.rand(3), torch.rand(3))", "torch.rand(2, 3, 5, 5)"),
     ""),
    ("attentive fingerprints", "torch_geometric==2.6.1", "torch_geometric==2.7.0",
     """\
import torch
from torch_geometric.nn import AttentiveFP

torch.manual_seed(0)
model = AttentiveFP(4, 8, 2, edge_dim=3, num_layers=2, num_timesteps=2).eval()
edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
model(torch.randn(4, 4), edges, torch.randn(4, 3), torch.tensor([0, 0, 1, 1]))
""", ""),
)  # fmt: skip

PAIRS = [VersionPair(*row[:4], frozenset(row[4].split())) for row in _TABLE]
