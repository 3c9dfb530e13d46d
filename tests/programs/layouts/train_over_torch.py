"""Train a small transformer for two steps in one process, or over ranks by torch's own means.

    train_over_torch.py [HOW [FAULT]]

HOW is `ddp`, `fsdp1`, `fsdp1_grad_op`, `fsdp1_hybrid`, `fsdp2`, `fsdp2_hybrid`, `fsdp2_tensor`, `loss_parallel`, `gpipe`,
`1f1b` or `interleaved`. Every layout accumulates the gradients of two microbatches and clips them.
Without HOW, the program is the reference.
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

HOW, FAULT = (*sys.argv[1:3], "", "")[:2]
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
WORDS, HIDDEN, HEADS, LENGTH, ROWS, LAYERS, MICROBATCHES, STEPS = 24, 16, 4, 6, 8, 4, 2, 2
PIPELINES = ("gpipe", "1f1b", "interleaved")
SPLITS_BATCH = SIZE > 1 and HOW not in (*PIPELINES, "loss_parallel")
REPLICAS = 2 if HOW == "fsdp2_tensor" else SIZE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in "qkv")
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def mesh(*shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def wrap(model):
    if HOW == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if HOW.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        strategy = {
            "fsdp1": ShardingStrategy.FULL_SHARD,
            "fsdp1_grad_op": ShardingStrategy.SHARD_GRAD_OP,
            "fsdp1_hybrid": ShardingStrategy.HYBRID_SHARD,
        }[HOW]
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_mesh=mesh(2, SIZE // 2) if HOW == "fsdp1_hybrid" else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    if HOW == "fsdp2_tensor":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        on = mesh(2, SIZE // 2)  # data parallel, tensor parallel
        for layer in model.layers.values():
            plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            plan |= dict.fromkeys(("proj", "down"), RowwiseParallel())
            parallelize_module(layer, on["shard"], plan)
            fully_shard(layer, mesh=on["replicate"])
        return fully_shard(model, mesh=on["replicate"])
    if HOW.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        on = {"mesh": mesh(2, SIZE // 2) if HOW == "fsdp2_hybrid" else mesh(SIZE)}
        for layer in model.layers.values():
            fully_shard(layer, **on)
        return fully_shard(model, **on)
    if HOW == "loss_parallel":
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        on = mesh(SIZE)
        row = RowwiseParallel(output_layouts=Shard(1))
        for layer in model.layers.values():
            plan = {
                "norm1": SequenceParallel(),
                "q": ColwiseParallel(input_layouts=Shard(1)),
                "k": ColwiseParallel(input_layouts=Shard(1)),
                "v": ColwiseParallel(input_layouts=Shard(1)),
                "proj": row,
                "norm2": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": row,
            }
            parallelize_module(layer, on, plan)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        return parallelize_module(model, on, plan)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids, targets = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
        targets[ROWS // 4 : ROWS // 2, 3:] = -100  # unequal numbers of tokens on the ranks
        yield ids, targets


def own_rows(x):
    if not SPLITS_BATCH:
        return x
    rank = 0 if FAULT == "same_rows" else RANK * REPLICAS // SIZE
    return x.chunk(REPLICAS)[rank]


def loss_of(logits, targets, tokens):
    if FAULT == "local_tokens":
        tokens = (targets >= 0).sum()
    flat = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(*flat, reduction="sum") / tokens


def accumulate(model, ids, targets):
    """Run the microbatches; the loss is that of all tokens of the batch."""
    tokens = (targets >= 0).sum() / (REPLICAS if SPLITS_BATCH else 1)
    for index in range(MICROBATCHES):
        own_ids, own_targets = (own_rows(x.chunk(MICROBATCHES)[index]) for x in (ids, targets))
        is_last = index == MICROBATCHES - 1
        context = nullcontext()
        if HOW == "ddp" and (not is_last or FAULT == "never_synchronized"):
            context = model.no_sync()
        if HOW == "fsdp2_hybrid":
            model.set_requires_all_reduce(is_last and FAULT != "replicas_not_reduced")
        if HOW == "loss_parallel":
            from torch.distributed.tensor.parallel import loss_parallel

            context = loss_parallel()
        with context:
            loss_of(model(own_ids), own_targets, tokens).backward()


class Pipeline:
    """The stages of this rank; the layers are those of the whole model by name."""

    def __init__(self, model):
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        own = [RANK, RANK + SIZE] if HOW == "interleaved" else [RANK]
        count = SIZE * len(own)
        size = LAYERS // count
        self.stages, self.modules, self.is_last = [], [], count - 1 in own
        for number in own:
            stage = Transformer()
            stage.load_state_dict(model.state_dict())
            first = number * size
            if FAULT == "layers_of_another_stage" and number == 1:
                first = 0
            kept = {str(index): model.layers[str(index)] for index in range(first, first + size)}
            stage.layers = nn.ModuleDict(kept)
            if number:
                stage.embed = None
            if number < count - 1:
                stage.norm = stage.head = None
            self.modules.append(stage)
            self.stages.append(PipelineStage(stage, number, count, torch.device("cpu")))
        schedule = {
            "gpipe": ScheduleGPipe,
            "1f1b": Schedule1F1B,
            "interleaved": ScheduleInterleaved1F1B,
        }[HOW]
        stages = self.stages if HOW == "interleaved" else self.stages[0]
        self.schedule = schedule(stages, MICROBATCHES, loss_fn=self.loss, scale_grads=False)

    def loss(self, logits, targets):
        if FAULT == "targets_of_another_microbatch":
            targets = self.targets.chunk(MICROBATCHES)[0]
        return loss_of(logits, targets, self.tokens)

    def run(self, ids, targets):
        self.targets, self.tokens = targets, (targets >= 0).sum()
        arguments = (ids,) if RANK == 0 else ()
        keywords = {"target": targets} if self.is_last else {}
        self.schedule.step(*arguments, **keywords)

    def parameters(self):
        return [p for module in self.modules for p in module.parameters()]


def clip(model, parameters, most=0.5):
    if HOW in PIPELINES:
        square = torch.stack([p.grad.square().sum() for p in parameters]).sum()
        if FAULT != "local_norm":
            dist.all_reduce(square)
        for parameter in parameters:
            parameter.grad.mul_((most / square.sqrt()).clamp(max=1.0))
    elif HOW == "fsdp2_tensor":  # the parameters are on two meshes
        square = sum(p.grad.norm().full_tensor().square() for p in parameters)
        for parameter in parameters:
            parameter.grad.mul_((most / square.sqrt()).clamp(max=1.0))
    elif HOW.startswith("fsdp1") and FAULT != "local_norm":
        model.clip_grad_norm_(most)
    else:
        nn.utils.clip_grad_norm_(parameters, most)


def main():
    torch.manual_seed(0)
    model = Transformer()
    if SIZE > 1:
        dist.init_process_group("gloo")
        if HOW not in PIPELINES:
            model = wrap(model)
    pipeline = Pipeline(model) if HOW in PIPELINES else None
    parameters = list((pipeline or model).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    if FAULT == "another_rate" and RANK == SIZE - 1:
        optimizer.param_groups[0]["lr"] = 0.02
    for ids, targets in batches():
        optimizer.zero_grad()
        if pipeline:
            pipeline.run(ids, targets)
        else:
            accumulate(model, ids, targets)
        clip(model, parameters)
        optimizer.step()
    if SIZE > 1:
        dist.destroy_process_group()


main()
