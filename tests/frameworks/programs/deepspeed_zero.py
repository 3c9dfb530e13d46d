"""Trains with DeepSpeed, whose optimizer holds flat copies of the parameters: STAGE says how. Under
torchrun each rank has a part of them.
"""

import os

import deepspeed
import torch
from checks import check, digest, exact, leave, logged
from torch import nn

# communicate by gloo: DeepSpeed's own kernel would be compiled for minutes, and a build that was killed
# leaves a lock for which every later run waits
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
os.environ.setdefault("LOCAL_RANK", "0")
store = torch.distributed.HashStore() if ranks == 1 else None
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": int(os.environ["STAGE"])},
    "bf16": {"enabled": True},
    "steps_per_print": 10**9,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
generator = torch.Generator().manual_seed(1 + rank)
for micro_step in range(6):
    x = torch.randn(4, 8, generator=generator).bfloat16()
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    step, rate = engine.global_steps, engine.get_lr()[0]
    if rank == 0:
        logged("loss", step, loss / 2)
    engine.step()
    if engine.global_steps > step and rank == 0:
        logged("lr[0]", step, rate)
        logged("grad_norm", step, engine.get_global_grad_norm())
    check("step", rank, engine.global_steps, exact(loss))
    if micro_step == 3:
        with torch.no_grad():
            check("validation", rank, exact(engine(x).float().sum()))
check("final", rank, digest(model))
torch.distributed.destroy_process_group()
leave()
