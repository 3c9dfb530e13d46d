"""How the programs of this folder begin: the words of the command line, and the group of ranks."""

import os
import sys
from contextlib import contextmanager

import torch.distributed as dist

WORDS = frozenset(sys.argv[1:])
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def faulty(name):
    """Return whether `fault=NAME` is switched on; one process never has a fault."""
    return SIZE > 1 and f"fault={name}" in WORDS


def chosen(word):
    """Return whether the ranks are laid out in this way; one process is not laid out."""
    return SIZE > 1 and word in WORDS


@contextmanager
def group_of_ranks():
    if SIZE > 1:
        dist.init_process_group("gloo")
    yield
    if SIZE > 1:
        dist.destroy_process_group()
