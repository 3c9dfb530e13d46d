"""A small training program that tells after each step what it has computed, and ends as its plan says.

The plan is JSON in CHAOS_PLAN: see `Plan` in `tests/chaos/arena.py`. Each thread and each forked child
tells in a file of its own, so that two runs can be compared line by line.
"""

import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time

plan = json.loads(os.environ["CHAOS_PLAN"])


def end() -> None:
    if plan["end"] == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, plan["end"]))


if plan["handler"]:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(4))
if plan["after_s"] is not None:
    timer = threading.Timer(plan["after_s"], end)
    timer.daemon = True
    timer.start()

import torch  # noqa: E402 - the end may come before it

from tests.chaos.odd import make_odd  # noqa: E402


def train(role: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    odd = make_odd(plan["odd"])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), odd, torch.nn.Linear(8, 4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    told = os.open(role, os.O_WRONLY | os.O_CREAT, 0o666)
    for step in range(plan["steps"]):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest = hashlib.sha256(loss.detach().numpy().tobytes())
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        if role == "main" and not plan["threads"]:  # the random numbers of all threads are the same
            digest.update(repr((torch.rand(2).tolist(), random.random())).encode())
        os.write(told, f"{step} {digest.hexdigest()} {time.monotonic()}\n".encode())
        time.sleep(plan["pause_s"])


torch.manual_seed(plan["seed"])
random.seed(plan["seed"])
children = []
for n in range(plan["forks"]):
    child = os.fork()
    if not child:
        # where it stands if it never ends
        faulthandler.dump_traceback_later(60, file=open(f"stuck{n}", "w"))  # noqa: SIM115 - kept
        train(f"fork{n}", n)
        sys.exit(0)
    children.append(child)
# after the forks: a lock of torch that a thread holds would never be free in a child
threads = [threading.Thread(target=train, args=(f"thread{n}", n)) for n in range(plan["threads"])]
for thread in threads:
    thread.start()
train("main", plan["seed"])
for thread in threads:
    thread.join()
for child in children:
    os.waitpid(child, 0)
if plan["end"] == "raise" and plan["after_s"] is None:
    raise ValueError("mine")
