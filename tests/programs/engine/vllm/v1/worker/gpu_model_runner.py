"""The calls that vLLM's model runner makes in an engine step, on a model of two layers."""

import torch
from torch import nn


class Sampler(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(hidden)


class GPUModelRunner:
    def __init__(self) -> None:
        self.model, self.sampler = LanguageModel(), Sampler()
        self.execute_model_state: torch.Tensor | None = None

    @torch.inference_mode()
    def execute_model(self, tokens: torch.Tensor) -> None:
        hidden = self.model(tokens)
        self.execute_model_state = self.model.compute_logits(hidden[-1:])

    @torch.inference_mode()
    def sample_tokens(self) -> torch.Tensor:
        logits, self.execute_model_state = self.execute_model_state, None
        return self.sampler(logits)

    def _dummy_run(self, size: int) -> None:
        self.model(torch.zeros(size, dtype=torch.long))
