"""Trains a small model for two steps with DeepSpeed, whose ranks have a part of each batch.

    deepspeed_layouts.py [stage=0|1|2|3] [FAULT]

Run in one process, it is the reference. Each step accumulates two microbatches.
"""

import os
import sys

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

# communicate by gloo: DeepSpeed's own kernel would be compiled for minutes
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ARGUMENTS = set(sys.argv[1:])
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
STAGE = next((int(word[-1]) for word in ARGUMENTS if word.startswith("stage=")), 0)
ROWS, WORDS, HIDDEN, MICROBATCHES = 8, 24, 16, 2


def is_wrong(fault):
    return SIZE > 1 and fault in ARGUMENTS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    os.environ.setdefault("LOCAL_RANK", "0")
    store = torch.distributed.HashStore() if SIZE == 1 else None
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": ROWS // MICROBATCHES // SIZE,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": STAGE},
        "steps_per_print": 10**9,
    }
    if is_wrong("predivided"):
        config |= {"prescale_gradients": True, "gradient_predivide_factor": 4.0}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if is_wrong("stale_weight") and RANK == 1:
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(1.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids, targets = torch.randint(WORDS, (2, ROWS, 6), generator=generator)
        targets[: ROWS // 2 : 3, 2:] = -100
        tokens = (targets >= 0).sum() / SIZE / MICROBATCHES
        for index in range(MICROBATCHES):
            rank = 0 if is_wrong("same_rows") else RANK
            own_ids, own_targets = (
                x.chunk(MICROBATCHES)[index].chunk(SIZE)[rank] for x in (ids, targets)
            )
            own_tokens = (own_targets >= 0).sum() if is_wrong("local_tokens") else tokens
            logits = engine(own_ids)
            losses = F.cross_entropy(logits.flatten(0, 1), own_targets.flatten(), reduction="sum")
            engine.backward(losses / own_tokens)
            engine.step()
    torch.distributed.destroy_process_group()


main()
