"""Prints what of FastVideo is ours: before the start, while running, and after the stop."""

import json

import fastvideo.pipelines.basic.hunyuan15.hunyuan15_sr_pipeline as overriding
import fastvideo.pipelines.basic.zimage.stages as zimage
import fastvideo.training.training_pipeline as trainer
from fastvideo import profiler
from fastvideo.entrypoints.video_generator import VideoGenerator
from fastvideo.hooks import activation_trace
from fastvideo.pipelines import ComposedPipelineBase, composed_pipeline_base
from fastvideo.pipelines.stages.base import PipelineStage

import otel_torch


def replaceable():
    return {
        "pipeline": ComposedPipelineBase.forward,
        "pipeline with a forward of its own": overriding.HunyuanVideo15SRPipeline.forward,
        "subclasses to come": vars(ComposedPipelineBase).get("__init_subclass__"),
        "stage": PipelineStage.__call__,
        "generator": VideoGenerator._generate_single_video,
        "controller": vars(old_controller)["region"],
        "trace_step": activation_trace.trace_step,
        "trace_step, imported by name": zimage.trace_step,
        "attach_activation_trace, imported by name": composed_pipeline_base.attach_activation_trace,
        "get_or_create_profiler, imported by name": composed_pipeline_base.get_or_create_profiler,
        "profile_region, imported by name": trainer.profile_region,
        "register_profiler_region": profiler.register_profiler_region,
        "resolve_profiler_region": profiler.resolve_profiler_region,
        "TorchProfilerController": profiler.TorchProfilerController,
    }


old_controller = profiler.TorchProfilerController
before = replaceable()
otel_torch.start()
during = replaceable()
short_name_of_the_documents = profiler.resolve_profiler_region("training_optimizer")
profiler.register_profiler_region("my_own_region", "registered with FastVideo")
ours = otel_torch.resolve_profiler_region("my_own_region")
otel_torch.stop()
after = replaceable()
theirs = profiler.resolve_profiler_region("my_own_region")
print(
    json.dumps(
        {
            "not replaced": [name for name in before if during[name] is before[name]],
            "not restored": [name for name in before if after[name] is not before[name]],
            "resolved": [bool(short_name_of_the_documents), bool(ours), bool(theirs)],
        }
    )
)
