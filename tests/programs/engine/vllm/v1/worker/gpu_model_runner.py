"""The calls that vLLM's model runner makes in an engine step, on a model of two layers."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn


class Sampler(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(hidden)


class GPUModelRunner:
    def __init__(self) -> None:
        self.model, self.sampler = LanguageModel(), Sampler()
        self.execute_model_state: torch.Tensor | None = None
        self.requests: dict[str, int] = {}  # computed tokens
        self.query_start_loc = SimpleNamespace(np=np.zeros(8, dtype=np.int32))

    def get_model(self) -> nn.Module:
        return self.model

    @torch.inference_mode()
    def execute_model(self, scheduled: dict[str, list[int]], padded: int = 0) -> None:
        """Run the tokens of each request, and up to `padded` more."""
        computed = [self.requests.setdefault(name, 0) for name in scheduled]
        self.input_batch = SimpleNamespace(
            req_ids=list(scheduled), num_computed_tokens_cpu=np.array(computed)
        )
        counts = [len(tokens) for tokens in scheduled.values()]
        ends = np.cumsum(counts)
        self.query_start_loc.np[1 : len(ends) + 1] = ends
        packed = [token for tokens in scheduled.values() for token in tokens]
        ids = torch.tensor(packed + [0] * (padded - len(packed)))
        hidden = self.model(input_ids=ids, positions=torch.zeros_like(ids))
        self.execute_model_state = self.model.compute_logits(hidden[ends - 1])
        for name, count in zip(scheduled, counts, strict=True):
            self.requests[name] += count

    @torch.inference_mode()
    def sample_tokens(self) -> torch.Tensor:
        logits, self.execute_model_state = self.execute_model_state, None
        return self.sampler(logits)

    def _dummy_run(self, size: int) -> None:
        ids = torch.zeros(size, dtype=torch.long)
        self.model(input_ids=ids, positions=ids)

    def _dummy_sampler_run(self) -> None:
        self.sampler(torch.zeros(1, 8))

    def profile_run(self) -> None:
        self._dummy_run(2)
        self._dummy_sampler_run()
