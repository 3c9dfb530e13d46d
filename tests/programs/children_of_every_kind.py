"""Run the model in children of every kind, and print the role and process id of each."""

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading

from torch.utils.data import DataLoader, Dataset
from two_layers import run, x


def child(role):
    run(2)
    print(role, os.getpid(), flush=True)


def raising(role):
    child(role)
    raise ValueError("mine")


def waiting(role, connection):
    child(role)
    connection.send("ready")
    threading.Event().wait(60)


class Items(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        ours = [thread.name for thread in threading.enumerate() if "otel" in thread.name]
        os.write(
            1, (" ".join(["worker", str(os.getpid()), *ours]) + "\n").encode()
        )  # two workers, one pipe: in one piece
        return x


def forked(role, end):
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        child(role)
        end()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    run(1)
    context = multiprocessing.get_context("fork")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child, args=[method])
        process.start()
        process.join()
        assert process.exitcode == 0
    process = context.Process(target=raising, args=["raising"])
    process.start()
    process.join()
    assert process.exitcode == 1
    here, there = context.Pipe()
    process = context.Process(target=waiting, args=["terminated", there])
    process.start()
    here.recv()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        pool.submit(child, "executor").result()
    with context.Pool(1) as pool:
        pool.apply(child, ["pool"])
    assert forked("os.fork", sys.exit) == 0
    assert forked("os.fork and os._exit", lambda: os._exit(0)) == 0

    held = threading.Event()
    forked_now = threading.Event()

    def hold():
        from otel_torch import bootstrap, session
        from otel_torch.regions import entry
        from otel_torch.sources.steps import step_clocks as steps

        registry = bootstrap._running.registry
        counting = next(iter(registry.models)).calls._lock
        active_steps = steps.current_step_tracker()._active
        with (
            active_steps.lock,
            session.current().recorder._lock,
            registry._lock,
            counting,
            entry._lock,
        ):
            held.set()
            forked_now.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    assert forked("forked from a thread's flush", sys.exit) == 0
    forked_now.set()
    holder.join()

    for _ in DataLoader(Items(), num_workers=2):
        pass
    run(1)
