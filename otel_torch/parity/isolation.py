"""Which tensor of the reference belongs into which place of the port: what the port needs to run
from right values.

A first fault makes everything after it wrong, and a second one cannot be told from that. When every
module of the port is given the reference's inputs and hands the reference's outputs on, whatever is
still wrong was made where it is seen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from otel_torch.parity.align import Alignment, Expectation
    from otel_torch.parity.call_graph import Role

SCHEMA = "otel_torch.isolation/1"
# beside the reference's tensors, so that one folder is all that the port's run needs to be told
FILE = "isolation.json"

Slot = tuple[str, str, str]  # model, module, tensor
_When = tuple[int, int, int]  # loop, step, call


def pairing_file(folder: str | Path) -> Path:
    """Where a pairing lies in the folder of the reference's tensors."""
    return Path(folder).expanduser() / FILE


@dataclass(slots=True)
class Pairing:
    """slots: the reference's place for the port's. shifts: how much later the port counts (loop,
    step, call) of a module.
    """

    slots: dict[Slot, Slot] = field(default_factory=dict)
    shifts: dict[tuple[str, str], _When] = field(default_factory=dict)

    def partner(self, slot: Slot, loop: int, step: int, call: int) -> tuple[Slot, _When] | None:
        """The reference's place of a tensor, and when it was there; None for one that has no
        counterpart.

        >>> pairing = Pairing({("Port", "b", "out"): ("Net", "a", "out")}, {("Port", "b"): (0, 1, 0)})
        >>> pairing.partner(("Port", "b", "out"), 0, 3, 0)
        (('Net', 'a', 'out'), (0, 2, 0))
        """
        found = self.slots.get(slot)
        if found is None:
            return None
        shift = self.shifts.get(slot[:2], (0, 0, 0))
        return found, (loop - shift[0], step - shift[1], call - shift[2])

    def save(self, folder: str | Path) -> Path:
        """Write it into the folder of the reference's tensors; returns the file. Raises OSError."""
        modules: dict[tuple[Slot | tuple[str, str], ...], dict[str, Any]] = {}
        for port, reference in self.slots.items():
            entry = modules.setdefault(
                (port[:2], reference[:2]),
                {"port": port[:2], "reference": reference[:2], "shift": (0, 0, 0), "tensors": {}},
            )
            entry["shift"] = self.shifts.get(port[:2], (0, 0, 0))
            entry["tensors"][port[2]] = reference[2]
        path = pairing_file(folder)
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in modules.values())
        path.write_text(f'{{"schema": "{SCHEMA}", "modules": [\n{lines}\n]}}\n', encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Pairing:
        """Read what `save` wrote. Raises ValueError, of one line, for a folder without it and for
        anything else in its place.
        """
        path = pairing_file(folder)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["schema"] != SCHEMA:
                raise ValueError(f"its schema is {found['schema']!r} and not {SCHEMA!r}")
            pairing = cls()
            for entry in found["modules"]:
                port, reference = (
                    tuple(map(str, entry["port"])),
                    tuple(map(str, entry["reference"])),
                )
                loop, step, call = map(int, entry["shift"])
                for mine, theirs in entry["tensors"].items():
                    pairing.slots[port[0], port[1], mine] = reference[0], reference[1], str(theirs)
                if loop or step or call:
                    pairing.shifts[port[0], port[1]] = loop, step, call
            return pairing
        except FileNotFoundError:
            raise ValueError(
                f"{path} is not there; write it with `otel-torch diff REFERENCE PORT --save-isolation {folder}`"
            ) from None
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not say what belongs where ({' '.join(str(error).split())})"
            ) from None


class PairingFinder:
    """Learns a pairing from one aligned stretch of run after the other."""

    def __init__(self) -> None:
        self._votes: dict[Slot, Counter[_Vote]] = {}
        self._shifts: dict[tuple[str, str], Counter[_When]] = {}
        self._held: Counter[tuple[_Likes, _Likes]] = (
            Counter()
        )  # how often places alike held the same numbers
        self._known: set[_Likes] = set()

    def learn(self, alignment: Alignment, harmless: Iterable[Expectation] = ()) -> None:
        """Take in one stretch. harmless: what was found to differ without being wrong, which is to
        stay as it is.
        """
        left_alone = {id(one) for one in harmless}
        for one in alignment.expectations:
            if id(one) not in left_alone and _fits(one):
                self._learn(one)

    def _learn(self, one: Expectation) -> None:
        reference, port = one.reference[0], one.port[0]
        slot, likes = _slot(port), (_likes(port), _likes(reference))
        if one.right and not port.value.constant:
            self._held[likes] += 1
            self._known.add(likes[0])
        self._votes.setdefault(slot, Counter())[
            _Vote(_slot(reference), one.right, _is_sure(one), *likes)
        ] += 1
        shift = tuple(a - b for a, b in zip(_when(port), _when(reference), strict=True))
        self._shifts.setdefault(slot[:2], Counter())[shift] += 1  # type: ignore[index]

    def pairing(self) -> Pairing:
        """What was learned. Of several candidates the one that held the same numbers wins, then the
        one whose likes did in other blocks, then the one seen more often.
        """
        found = Pairing()
        for slot, votes in self._votes.items():
            best, _ = max(
                votes.items(),
                key=lambda vote: (
                    vote[0].right,
                    self._held[vote[0].likes, vote[0].theirs],
                    vote[1],
                ),
            )
            if (
                best.right
                or self._held[best.likes, best.theirs]
                or (best.sure and best.likes not in self._known)
            ):
                found.slots[slot] = best.slot
        for module, shifts in self._shifts.items():
            shift = shifts.most_common(1)[0][0]
            if any(shift):
                found.shifts[module] = shift
        return found


# a place in any block: model, pattern of the module's name, tensor, and how many tensors it came
# with
_Likes = tuple[str, str, str, int]


class _Vote(NamedTuple):
    """The reference's place, whether its numbers were the port's, and whether it is the one even if
    they were not.
    """

    slot: Slot
    right: bool
    sure: bool
    likes: _Likes
    theirs: _Likes


def _fits(one: Expectation) -> bool:
    """Whether the reference's tensor can stand in the port's place at all: one for one, of equal
    size and kind.
    """
    if len(one.reference) != 1 or len(one.port) != 1:
        return False
    reference, port = one.reference[0].value, one.port[0].value
    return reference.numel == port.numel and reference.exact == port.exact


def _is_sure(one: Expectation) -> bool:
    """Whether the two are meant to be the same thing, though they hold other numbers: modules of
    one name may be two things, and what encloses others may hand on another part of what they made.
    """
    if one.ground == "alike":
        return False
    if one.ground in ("owner", "fused"):
        return one.ground == "owner" or one.port[0].side == "input"
    return _alone(one.reference[0]) and _alone(one.port[0])


def _alone(role: Role) -> bool:
    """Whether it is the only one of its call and side that computation could have made."""
    return _company(role) == 1


def _company(role: Role) -> int:
    """How many of its call and side computation could have made: a block that is given a residual,
    too, is given another thing beside it.
    """
    return sum(
        not other.value.exact and not other.value.constant for other in role.call.roles(role.side)
    )


def _slot(role: Role) -> Slot:
    return role.call.model, role.call.module, role.tensor


def _likes(role: Role) -> _Likes:
    from otel_torch.parity.parameters import (
        pattern,  # not above: what runs in the port needs no NumPy
    )

    return role.call.model, pattern(role.call.module), role.tensor, _company(role)


def _when(role: Role) -> _When:
    return role.call.loop or 0, role.call.step or 0, role.call.number or 0
