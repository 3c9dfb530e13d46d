"""Serves two requests with the stand-in for vLLM's model runner, after a profiling run."""

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

torch.manual_seed(0)
runner = GPUModelRunner()
runner.profile_run()
for scheduled in (
    {"b": [1, 2]},  # a part of a prompt
    {"b": [3], "a": [4, 5, 6]},
    {"a": [7], "b": [1]},
):
    runner.execute_model(scheduled, padded=5)
    runner.sample_tokens()
del runner.requests["a"]
runner.execute_model({"c": [2], "b": [3]})
runner.sample_tokens()
runner.sampler(torch.ones(1, 8))  # outside of any engine step
