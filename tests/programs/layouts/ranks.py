"""What the programs of this folder share: their arguments, groups of ranks, and sums over them."""

import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist

ARGUMENTS = set(sys.argv[1:])
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def is_wrong(fault):
    return SIZE > 1 and fault in ARGUMENTS


@contextmanager
def joined(*groups):
    """Take part in a process group, if there are several ranks."""
    if SIZE > 1:
        dist.init_process_group("gloo")
        for group in groups:
            group.connect()
    yield
    if SIZE > 1:
        dist.destroy_process_group()


class Group:
    """The ranks that this rank shares a dimension of the mesh with; `name=N` says how many."""

    def __init__(self, name, stride):
        sizes = dict(argument.split("=") for argument in ARGUMENTS if "=" in argument)
        self.size = int(sizes.get(name, 1)) if SIZE > 1 else 1
        self.rank, self.stride = RANK // stride % self.size, stride
        self.handle, self.members = None, []
        # a chunk from the beginning and one from the end have as many keys as any other pair
        self.is_balanced = name == "context" and "balanced" in ARGUMENTS and self.size > 1

    def connect(self):
        for first in range(SIZE):
            if first // self.stride % self.size == 0:
                members = [first + index * self.stride for index in range(self.size)]
                handle = dist.new_group(members)
                if RANK in members:
                    self.handle, self.members = handle, members

    def add_up(self, x, operation=dist.ReduceOp.SUM):
        x = x.clone()
        if self.size > 1:
            dist.all_reduce(x, operation, group=self.handle)
        return x

    def largest(self, x):
        return self.add_up(x, dist.ReduceOp.MAX)

    def gather(self, x, dim):
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.handle)
        if self.is_balanced:
            halves = [part.chunk(2, dim) for part in parts]
            parts = [first for first, _ in halves] + [second for _, second in reversed(halves)]
        return torch.cat(parts, dim)

    def own(self, x, dim, rank=None):
        rank = self.rank if rank is None else rank
        if self.is_balanced:
            chunks = x.chunk(2 * self.size, dim)
            return torch.cat([chunks[rank], chunks[-1 - rank]], dim)
        return x.chunk(self.size, dim)[rank].contiguous()


class AddUp(torch.autograd.Function):
    """Add up the terms of groups, one group after the other; the gradient passes."""

    @staticmethod
    def forward(context, x, *groups):
        context.count = len(groups)
        for group in groups:
            x = group.add_up(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient, *[None] * context.count


class Copy(torch.autograd.Function):
    """Pass a tensor on to a group; the gradients add up."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return context.group.add_up(gradient), None
