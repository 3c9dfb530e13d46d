"""Denoising stages as other model families write them, in FastVideo's own pipeline classes around
one linear layer.
"""

import contextlib

import torch
from fastvideo.forward_context import set_forward_context
from fastvideo.hooks.activation_trace import trace_step
from fastvideo.pipelines import ComposedPipelineBase, ForwardBatch
from fastvideo.pipelines.stages.base import PipelineStage


class Family(PipelineStage):
    """Runs its model once or twice for each of the `contexts` that it puts into the forward
    context.
    """

    contexts: tuple = ()
    calls = 1

    def __init__(self, model):
        self.model = model

    def forward(self, batch, fastvideo_args):
        for context in self.contexts:
            with set_forward_context(
                current_timestep=context, attn_metadata=None, forward_batch=batch
            ):
                for _ in range(self.calls):
                    self.model(torch.ones(2, 2))
        return batch


class IndexDenoisingStage(Family):
    contexts = (0, 1, 2)


class TimestepDenoisingStage(Family):
    contexts = (999, 666, 333)
    calls = 2


class SigmaDenoisingStage(Family):
    contexts = (1.0, 0.5, 0.25)


class TensorDenoisingStage(Family):
    contexts = (torch.tensor([999.0, 0.0]), torch.tensor([500.0, 0.0]))


class GuidedDenoisingStage(Family):
    contexts = (0, 1)

    def forward(self, batch, fastvideo_args):
        for context in self.contexts:
            batch.is_cfg_negative = False
            with set_forward_context(
                current_timestep=context, attn_metadata=None, forward_batch=batch
            ):
                self.model(torch.ones(2, 2))
            batch.is_cfg_negative = True
            with set_forward_context(
                current_timestep=context, attn_metadata=None, forward_batch=batch
            ):
                self.model(torch.zeros(2, 2))
        return batch


class TracingDenoisingStage(Family):
    def forward(self, batch, fastvideo_args):
        for step, timestep in enumerate((999, 500)):
            with (
                trace_step(step),
                set_forward_context(
                    current_timestep=timestep, attn_metadata=None, forward_batch=batch
                ),
            ):
                self.model(torch.ones(2, 2))
        return batch


class UnaskedDenoisingStage(Family):
    """Says nothing: each forward is a step of its own."""

    def forward(self, batch, fastvideo_args):
        with set_forward_context(current_timestep=0, attn_metadata=None):
            self.model(torch.ones(2, 2))
            self.model(torch.ones(2, 2))
        return batch


class RaisingDenoisingStage(Family):
    contexts = (0,)

    def forward(self, batch, fastvideo_args):
        super().forward(batch, fastvideo_args)
        raise ValueError("this stage raises")


def model_named(name):
    return type(name, (torch.nn.Linear,), {})(2, 2)


class FamilyPipeline(ComposedPipelineBase):
    post_init_called = True

    def __init__(self, stage):
        self._stages, self._stage_name_mapping = [stage], {}

    def create_pipeline_stages(self, fastvideo_args):
        raise NotImplementedError


if __name__ == "__main__":
    for stage_class in Family.__subclasses__():
        stage = stage_class(model_named(stage_class.__name__.removesuffix("DenoisingStage")))
        with contextlib.suppress(ValueError):
            FamilyPipeline(stage).forward(ForwardBatch(data_type="video", guidance_scale=3.0), None)
