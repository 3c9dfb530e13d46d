"""Train a llama over tensor, context and data parallel ranks whose collectives are between modules.

    split_a_llama.py [tensor=N] [context=N] [data=N] [OPTION …] [FAULT]

Options of the model are `gated` (gate and up in one projection), `tied` (head and embedding) and `dropout`, that of the
layout is `ring` (keys and values go around instead of being gathered). Run in one process, it is
the reference. A rank's modules are those of torch, with its parts of the weights; their outputs
are terms of sums, which functions add up. The ranks of a tensor group are next to each other, then
those of a context group.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from ranks import ARGUMENTS, RANK, SIZE, Group, is_wrong, joined

WORDS, HIDDEN, HEADS, GROUPS, LENGTH, ROWS, LAYERS = 24, 32, 4, 2, 8, 4, 3
HEAD, WIDE = HIDDEN // HEADS, 48
PADDING = 0


class Around(Group):
    """A group whose tensors go around."""

    def rotate(self, x):
        """Return the tensor of the rank before, and send one to the rank after."""
        received = torch.empty_like(x)
        after = self.members[(self.rank + 1) % self.size]
        before = self.members[(self.rank - 1) % self.size]
        operations = [dist.P2POp(dist.isend, x.contiguous(), after)]
        operations.append(dist.P2POp(dist.irecv, received, before))
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return received


TENSOR = Group("tensor", 1)
CONTEXT = Around("context", TENSOR.size)
DATA = Group("data", TENSOR.size * CONTEXT.size)


class Sum(torch.autograd.Function):
    """Add up the terms of the tensor group."""

    @staticmethod
    def forward(context, x, name):
        if is_wrong(f"{name}:mean"):
            return TENSOR.add_up(x) / TENSOR.size
        group = DATA if is_wrong(f"{name}:another_group") else TENSOR
        return x.view_as(x) if is_wrong(f"{name}:missing") else group.add_up(x)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Spread(torch.autograd.Function):
    """Give a tensor to all ranks of the tensor group; the gradients add up."""

    @staticmethod
    def forward(context, x, name):
        context.name = name
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        if is_wrong(f"{context.name}:missing_backward"):
            return gradient, None
        return TENSOR.add_up(gradient), None


class GatherContext(torch.autograd.Function):
    """Put the positions of the context group together; their gradients add up."""

    @staticmethod
    def forward(context, x, dim):
        context.dim = dim
        return CONTEXT.gather(x, dim) if CONTEXT.size > 1 else x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return CONTEXT.own(CONTEXT.add_up(gradient), context.dim), None


class Ring(torch.autograd.Function):
    """Attention to keys and values that go around the context group, chunk by chunk."""

    @staticmethod
    def forward(context, q, k, v, name):
        local = q.shape[2]
        rows = CONTEXT.rank * local + torch.arange(local)
        total = torch.zeros_like(q)
        largest = q.new_full(q.shape[:-1], -torch.inf)
        weight = torch.zeros_like(largest)
        own_k, own_v = k, v
        steps = CONTEXT.size - (1 if is_wrong(f"{name}:chunk_missing") else 0)
        for step in range(steps):
            owner = (CONTEXT.rank - step) % CONTEXT.size
            columns = owner * local + torch.arange(local)
            scores = q @ k.transpose(-1, -2) / HEAD**0.5
            scores = scores.masked_fill(rows[:, None] < columns, -torch.inf)
            highest = torch.maximum(largest, scores.amax(-1))
            finite = highest.masked_fill(highest == -torch.inf, 0.0)
            exponentials = (scores - finite[..., None]).exp()
            rescale = (largest - finite).exp()
            if is_wrong(f"{name}:not_rescaled"):
                rescale = torch.ones_like(rescale)
            total = total * rescale[..., None] + exponentials @ v
            weight = weight * rescale + exponentials.sum(-1)
            largest = highest
            if step + 1 < steps:
                k, v = CONTEXT.rotate(k), CONTEXT.rotate(v)
        output = total / weight[..., None]
        context.save_for_backward(q, own_k, own_v, output, largest + weight.log())
        return output

    @staticmethod
    def backward(context, gradient):
        q, k, v, output, normalizer = context.saved_tensors
        k, v = CONTEXT.gather(k, 2), CONTEXT.gather(v, 2)
        local = q.shape[2]
        rows = CONTEXT.rank * local + torch.arange(local)
        scores = q @ k.transpose(-1, -2) / HEAD**0.5
        scores = scores.masked_fill(rows[:, None] < torch.arange(k.shape[2]), -torch.inf)
        weights = (scores - normalizer[..., None]).exp()
        inner = (gradient * output).sum(-1, keepdim=True)
        grad_scores = weights * (gradient @ v.transpose(-1, -2) - inner) / HEAD**0.5
        grad_k, grad_v = grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient
        grad_k, grad_v = (CONTEXT.own(CONTEXT.add_up(x), 2) for x in (grad_k, grad_v))
        return grad_scores @ k, grad_k, grad_v, None


def linear(outputs, inputs, dim=None, rank=None, parts=1):
    """Return a layer with this rank's part of a random weight, cut part by part."""
    whole = torch.randn(outputs, inputs) / inputs**0.5
    if dim is not None:
        pieces = [TENSOR.own(piece, dim, rank) for piece in whole.chunk(parts, dim)]
        whole = torch.cat(pieces, dim)
    layer = nn.Linear(whole.shape[1], whole.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(whole.clone())
    layer.weight.is_part = dim is not None
    return layer


class HeadNorm(nn.Module):
    """A norm of each head, whose weight all ranks have."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(size) / 8)

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def rotate(x, positions):
    frequencies = 100.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Dropout(nn.Module):
    """Dropout whose mask is that of the whole tensor, of which a rank takes its part."""

    def __init__(self, name):
        super().__init__()
        self.name, self.calls = name, 0

    def forward(self, x, is_part=False):
        if "dropout" not in ARGUMENTS:
            return x
        self.calls += 1
        seed = hash_of(self.name) + self.calls
        if is_wrong(f"{self.name}:stream"):
            seed += 1000 * TENSOR.rank
        size = TENSOR.size if is_part else 1
        shape = (ROWS, LENGTH, x.shape[-1] * size)
        mask = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.2) / 0.8
        mask = CONTEXT.own(DATA.own(mask, 0), 1)
        if is_part:
            mask = TENSOR.own(mask, -1, 0 if is_wrong(f"{self.name}:equal_stream") else None)
        return x * mask


def hash_of(name):
    return sum(index * ord(letter) for index, letter in enumerate(name, 1))


class Attention(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.q_proj = linear(HIDDEN, HIDDEN, 0)
        # more ranks than heads of keys: neighbors share one
        self.is_shared = TENSOR.size > GROUPS
        self.k_proj, self.v_proj = self.shared(), self.shared()
        self.q_norm, self.k_norm = HeadNorm(HEAD), HeadNorm(HEAD)
        self.o_proj = linear(HIDDEN, HIDDEN, 1)

    def shared(self):
        layer = linear(GROUPS * HEAD, HIDDEN)
        count = min(GROUPS, TENSOR.size)
        part = layer.weight.detach().chunk(count)[TENSOR.rank * count // TENSOR.size]
        layer.weight = nn.Parameter(part.contiguous())
        layer.weight.is_part, layer.weight.copies = True, TENSOR.size // count
        return layer

    def forward(self, x):
        def heads(x):
            return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

        x = Spread.apply(x, self.name)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        positions = CONTEXT.own(torch.arange(LENGTH), 0)
        if is_wrong(f"{self.name}:local_positions"):
            positions = torch.arange(x.shape[1])
        q, k = rotate(self.q_norm(q), positions), rotate(self.k_norm(k), positions)
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        if "ring" in ARGUMENTS and CONTEXT.size > 1:
            x = Ring.apply(q, k, v, self.name)
        else:
            k, v = GatherContext.apply(k, 2), GatherContext.apply(v, 2)
            rows = CONTEXT.own(torch.arange(LENGTH), 0)
            mask = rows[:, None] >= torch.arange(LENGTH)
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return Sum.apply(self.o_proj(x.transpose(1, 2).flatten(2)), f"{self.name}.o_proj")


class Perceptron(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        if "gated" in ARGUMENTS:
            self.gate_up_proj = linear(
                2 * WIDE, HIDDEN, 0, parts=1 if is_wrong(f"{name}:halves") else 2
            )
        else:
            self.gate_proj = linear(WIDE, HIDDEN, 0)
            self.up_proj = linear(WIDE, HIDDEN, 0, 0 if is_wrong(f"{name}:shard") else None)
        swapped = 1 - TENSOR.rank if is_wrong(f"{name}:swapped") else None
        self.down_proj = linear(HIDDEN, WIDE, 1, swapped)
        self.dropout = Dropout(f"{name}.dropout")

    def forward(self, x):
        x = Spread.apply(x, self.name)
        if "gated" in ARGUMENTS:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        x = self.dropout(F.silu(gate) * up, is_part=True)
        x = Sum.apply(self.down_proj(x), f"{self.name}.down_proj")
        return Sum.apply(x, f"{self.name}.again") if is_wrong(f"{self.name}:doubled") else x


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = HeadNorm(HIDDEN), HeadNorm(HIDDEN)
        self.self_attn, self.mlp = Attention(f"{name}.self_attn"), Perceptron(f"{name}.mlp")
        self.dropout = Dropout(f"{name}.dropout")

    def forward(self, x):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS // TENSOR.size, HIDDEN, device="meta")
        rows = torch.randn(WORDS, HIDDEN) / 4
        own = (TENSOR.rank + 1) % TENSOR.size if is_wrong("embedding_rows") else TENSOR.rank
        self.embed_tokens.weight = nn.Parameter(TENSOR.own(rows, 0, own))
        self.embed_tokens.weight.is_part = True
        self.layers = nn.ModuleList(Layer(f"layers.{index}") for index in range(LAYERS))
        self.norm = HeadNorm(HIDDEN)
        self.lm_head = linear(WORDS, HIDDEN, 0)
        if "tied" in ARGUMENTS:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        count = WORDS // TENSOR.size
        first = TENSOR.rank * count
        is_here = (ids >= first) & (ids < first + count)
        x = self.embed_tokens((ids - first).clamp(0, count - 1))
        if not is_wrong("unmasked_words"):
            x = x * is_here[..., None]
        x = Sum.apply(x, "embed_tokens")
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(Spread.apply(self.norm(x), "lm_head"))


class CrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits that are split over the vocabulary, a number for each token."""

    @staticmethod
    def forward(context, logits, targets):
        count = logits.shape[-1]
        first = TENSOR.rank * count
        logits = logits - TENSOR.largest(logits.amax(-1))[..., None]
        is_here = (targets >= first) & (targets < first + count)
        own = (targets - first).clamp(0, count - 1)
        if is_wrong("unmasked_targets"):
            is_here = torch.ones_like(is_here)
        picked = TENSOR.add_up(logits.gather(-1, own[..., None])[..., 0] * is_here)
        exponentials = logits.exp()
        total = exponentials.sum(-1)
        if not is_wrong("local_normalizer"):
            total = TENSOR.add_up(total)
        hot = F.one_hot(own, count) * is_here[..., None]
        context.save_for_backward(exponentials / total[..., None] - hot)
        return total.log() - picked

    @staticmethod
    def backward(context, gradient):
        (own,) = context.saved_tensors
        return own * gradient[..., None], None


def loss_of(logits, targets):
    losses, counts = CrossEntropy.apply(logits, targets), (targets != PADDING).float()
    if is_wrong("padding_counted"):
        counts = torch.ones_like(counts)
    replicas = DATA.size * CONTEXT.size
    tokens = DATA.add_up(CONTEXT.add_up(counts.sum())) / replicas
    if is_wrong("local_tokens"):
        tokens = counts.sum()
    return (losses * counts).sum() / tokens


def reduce_gradients(model):
    divisor = DATA.size * CONTEXT.size
    if is_wrong("world_size"):
        divisor = SIZE
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and not is_wrong("head_norms"):
            parameter.grad = TENSOR.add_up(parameter.grad)
        if getattr(parameter, "copies", 1) > 1 and not is_wrong("shared_heads"):
            slots = parameter.grad.new_zeros(GROUPS, *parameter.shape)
            own = TENSOR.rank * GROUPS // TENSOR.size
            slots[own] = parameter.grad
            parameter.grad = TENSOR.add_up(slots)[own].contiguous()
        if not is_wrong("context_not_reduced"):
            parameter.grad = CONTEXT.add_up(parameter.grad)
        if not is_wrong("data_not_reduced"):
            parameter.grad = DATA.add_up(parameter.grad)
        parameter.grad /= divisor


def clip_gradients(model, most=0.5):
    squares = torch.zeros(())
    for parameter in model.parameters():
        if getattr(parameter, "is_part", False) or TENSOR.rank == 0:
            squares += parameter.grad.square().sum() / getattr(parameter, "copies", 1)
    if not is_wrong("local_clip"):
        squares = TENSOR.add_up(squares)
    for parameter in model.parameters():
        parameter.grad.mul_((most / squares.sqrt()).clamp(max=1.0))


def main():
    torch.manual_seed(0)
    model = Llama()
    with joined(TENSOR, CONTEXT, DATA):
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, momentum=0.9)
        if is_wrong("decay_on_rank") and RANK == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.2
        generator = torch.Generator().manual_seed(1)
        for step in range(2):
            ids, targets = torch.randint(1, WORDS, (2, ROWS, LENGTH), generator=generator)
            targets[: ROWS // 2, 5:] = PADDING
            targets[ROWS // 2 :, 7:] = PADDING
            ids, targets = (CONTEXT.own(DATA.own(x, 0), 1) for x in (ids, targets))
            optimizer.zero_grad()
            loss_of(model(ids), targets).backward()
            reduce_gradients(model)
            if "clip" in ARGUMENTS:
                clip_gradients(model)
            optimizer.step()
            if is_wrong("decayed_twice") and "tied" in ARGUMENTS:
                with torch.no_grad():
                    model.lm_head.weight.mul_(1 - 0.1 * 0.1)
            if is_wrong("stale") and RANK == 1 and not step:
                with torch.no_grad():
                    model.layers[1].input_layernorm.weight += 0.01


main()
