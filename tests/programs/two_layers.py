"""A model of two layers, three records a step; the second can call a function in its forward.

Tests append what a program does with it, so some imports are for them.
"""
# ruff: noqa: F401

import os
import signal
import sys
import threading
import time

import torch


class Between(torch.nn.Module):
    action = None

    def forward(self, x):
        if Between.action is not None:
            Between.action()
        return x


model = torch.nn.Sequential(torch.nn.Linear(4, 4), Between())
torch.nn.init.ones_(model[0].weight)
x = torch.ones(2, 4)


def run(steps):
    for _ in range(steps):
        model(x)


def send(number):
    os.kill(os.getpid(), number)
    threading.Event().wait(60)
