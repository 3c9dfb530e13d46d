"""One training of the corpus: a function, and the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

LAWS = (
    "every_step_skipped", "learning_rate_zero", "no_gradients", "gradients_zero",
    "optimizer_holds_others", "nothing_changes", "no_gradient", "not_held", "never_changes",
    "optimizer_remade", "gradients_not_cleared", "clipped_after_step", "clipped_early",
    "eval_while_training", "train_while_evaluating", "scheduler_never_stepped",
    "scheduler_before_optimizer", "same_batch", "weights_parted", "batch_norm_still",
    "state_not_continued", "rounded_away", "loss_ignores_inputs", "replicas_differ",
    "gradients_not_averaged", "same_batch_on_ranks",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A training that runs as `python run.py MODULE NAME`.

    Attributes:
        law: the one law that it breaks; None for a healthy training.
        ranks: the processes that run it; more than one form a group over gloo.
    """

    run: Callable[[], None]
    law: str | None
    ranks: int = 1

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def module(self) -> str:
        return self.run.__module__

    @property
    def uses_frameworks(self) -> bool:
        return self.module.rpartition(".")[2].startswith("by_")

    def verdict(self, named: Iterable[str]) -> str:
        """Return right, wrong or nothing; silent for a healthy program of which nothing is named."""
        laws = list(named)
        if not laws:
            return "nothing" if self.law else "silent"
        return "right" if laws == [self.law] else "wrong"


PROGRAMS: dict[str, Program] = {}
Decorator = Callable[[Callable[[], None]], Callable[[], None]]


def breaks(law: str | None, *, ranks: int = 1) -> Decorator:
    """Enter a function in the table as a training that breaks `law`."""
    assert law is None or law in LAWS, law

    def enter(run: Callable[[], None]) -> Callable[[], None]:
        assert run.__name__ not in PROGRAMS, run.__name__
        PROGRAMS[run.__name__] = Program(run, law, ranks)
        return run

    return enter


def healthy(run: Callable[[], None]) -> Callable[[], None]:
    """Enter a function in the table as a training that breaks no law."""
    return breaks(None)(run)
