"""Read and write `isolation.json`, which maps each tensor of a port to its tensor in the reference.

A run of the port loads it to compute every module from the reference's values
(`OTEL_TORCH_ISOLATE`); `otel-torch diff --save-isolation` writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "otel_torch.isolation/1"
# next to the reference's tensors, so that a run of the port needs one folder only
FILE = "isolation.json"

Slot = tuple[str, str, str]  # model, module, tensor
CallIndex = tuple[int, int, int]  # loop, step, call


def is_isolated(meta: dict[str, Any]) -> bool:
    """Return whether a recording, by its metadata, is of a run whose modules computed from the
    reference's values.
    """
    isolated = meta.get("isolated") or {}
    return bool(isolated.get("inputs") or isolated.get("outputs"))


def kept_slots(meta: dict[str, Any]) -> set[Slot]:
    """Return the tensors of an isolated run that kept the port's values."""
    isolated = meta.get("isolated") or {}
    return {(model, module, tensor) for model, module, tensor, _ in isolated.get("stayed", ())}


def pairing_file(folder: str | Path) -> Path:
    return Path(folder).expanduser() / FILE


@dataclass(slots=True)
class Pairing:
    """The tensors of a port and their counterparts in the reference.

    Args:
        slots: The reference's slot for each slot of the port.
        shifts: For a module of the port (model, module), how many loops, steps and calls later
            it runs than its counterpart.
    """

    slots: dict[Slot, Slot] = field(default_factory=dict)
    shifts: dict[tuple[str, str], CallIndex] = field(default_factory=dict)

    def partner(self, slot: Slot, loop: int, step: int, call: int) -> tuple[Slot, CallIndex] | None:
        """Return the reference's slot for a tensor of the port and its call there, or None.

        >>> slots = {("Port", "b", "out"): ("Net", "a", "out")}
        >>> pairing = Pairing(slots, shifts={("Port", "b"): (0, 1, 0)})
        >>> pairing.partner(("Port", "b", "out"), 0, 3, 0)
        (('Net', 'a', 'out'), (0, 2, 0))
        """
        partner = self.slots.get(slot)
        if partner is None:
            return None
        shift = self.shifts.get(slot[:2], (0, 0, 0))
        return partner, (loop - shift[0], step - shift[1], call - shift[2])

    def save(self, folder: str | Path) -> Path:
        """Write the pairing to the folder of the reference's tensors and return the file's path.

        Raises:
            OSError: The file cannot be written.
        """
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
        """Read a pairing that `save` wrote.

        Raises:
            ValueError: The file is missing or is not a pairing; the message is one line.
        """
        path = pairing_file(folder)
        try:
            return cls._parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{path} is not there; write it with "
                f"`otel-torch diff REFERENCE PORT --save-isolation {folder}`"
            ) from None
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} does not say what belongs where ({reason})") from None

    @classmethod
    def _parse(cls, text: str) -> Pairing:
        content = json.loads(text)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r} and not {SCHEMA!r}")
        pairing = cls()
        for entry in content["modules"]:
            port, reference = tuple(map(str, entry["port"])), tuple(map(str, entry["reference"]))
            loop, step, call = map(int, entry["shift"])
            for port_tensor, tensor in entry["tensors"].items():
                slot = port[0], port[1], port_tensor
                pairing.slots[slot] = reference[0], reference[1], str(tensor)
            if loop or step or call:
                pairing.shifts[port[0], port[1]] = loop, step, call
        return pairing
