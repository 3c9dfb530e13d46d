"""Generates four tokens with the stand-in for vLLM's model runner, after a dummy run."""

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

torch.manual_seed(0)
runner = GPUModelRunner()
runner._dummy_run(2)
tokens = torch.tensor([1, 2])
for _ in range(4):
    runner.execute_model(tokens)
    tokens = runner.sample_tokens()
runner.sampler(torch.ones(1, 8))  # outside of any engine step
