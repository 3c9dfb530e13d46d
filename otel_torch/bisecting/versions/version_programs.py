"""One program between two versions: as it is with each, and with changes taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from otel_torch.bisecting.processes import CommandPrograms, Surroundings
from otel_torch.bisecting.runs import ProgramRun, SideName
from otel_torch.bisecting.versions.environments import Suspect
from otel_torch.bisecting.versions.ranking import CodePlace, ExecutedFunctions
from otel_torch.bisecting.versions.splice import DoesNotFit, ModuleSplice
from otel_torch.code_exchange.plan import ExchangePlan
from otel_torch.parity.sides import Sides


class SettingChange(NamedTuple):
    """A setting that differs: an environment variable, or a name in torch such as
    `torch.backends.mkldnn.enabled`.
    """

    name: str
    values: Sides[str]

    @property
    def is_attribute(self) -> bool:
        """Whether it is set in torch, not in the environment."""
        return self.name.startswith("torch.")


Change = CodePlace | SettingChange


class VersionPrograms:
    """Runs one program with the old and the new version. The first run of each notes what it
    executes.

    Args:
        commands: The two commands, which share a folder.
        suspects: Packages and repositories that differ.
        settings: Settings that differ.
        surroundings: Where each side runs.
    """

    def __init__(
        self,
        commands: CommandPrograms,
        suspects: Sequence[Suspect],
        settings: Sequence[SettingChange],
        surroundings: Sides[Surroundings],
    ) -> None:
        self._commands, self.suspects, self.settings = commands, suspects, settings
        self.surroundings = surroundings
        self.runs: list[ProgramRun] = commands.runs
        self.folder = commands.folder
        self._exchanges = 0
        self.splice_of = cache(self._splice_of)
        # by the path below the folder of their package
        self.files: dict[str, Sides[Path | None]] = {}
        self._roots: list[tuple[Path, str]] = []
        for suspect in suspects:
            self.files |= suspect.files
            for side in suspect.roots:
                self._roots += [(root, name) for name, root in side.items()]
        # in a repository of the user's own, files are exchanged where they are: in our work tree
        self._is_ours = {name for own in suspects if "" in own.roots.port for name in own.files}

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        """Run one side as it is, or with what is exchanged by `taken_back`."""
        index = 0 if side == "reference" else 1
        if "exchange" not in settings:
            self._set_variables(side, index, ())
            settings = {**settings, "exchange": self._write_plan(side, index)}
        return self._commands.run(side, why, settings)

    def executed(self) -> ExecutedFunctions:
        """Return what the first runs of both sides have noted."""
        executed = ExecutedFunctions()
        for side in ("port", "reference"):
            executed.read(self.folder / f"executed-{side}", self.relative)
        return executed

    def relative(self, file: str) -> str | None:
        """Return a file's path below the folder of its package, None if it is in no suspect."""
        path = Path(file)
        for root, name in self._roots:
            if path == root:
                return root.name
            if path.is_relative_to(root):
                return str(Path(name, path.relative_to(root)))
        return None

    @contextmanager
    def taken_back(self, changes: Sequence[Change]) -> Iterator[str]:
        """Write what runs with changes taken back; yield the plan's file.

        Raises:
            DoesNotFit: The new version lacks what they need.
        """
        self._exchanges += 1
        folder = self.folder / f"exchange-{self._exchanges}"
        sources: dict[str, str] = {}
        ours: dict[Path, str] = {}
        by_file: dict[str, set[str]] = {}
        for change in changes:
            if isinstance(change, CodePlace):
                by_file.setdefault(change.file, set()).add(change.name)
        for file, names in sorted(by_file.items()):
            text = self.splice_of(file).splice(names)
            path = self.files[file].port
            assert path is not None
            if file in self._is_ours:
                ours[path] = text
                continue
            written = folder.resolve() / file
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(text, encoding="utf-8")
            sources[str(path)] = str(written)
        plan = folder / "plan.json"
        ExchangePlan(sources, self._attributes(1, changes)).write(plan)
        self._set_variables("port", 1, changes)
        before = {path: path.read_bytes() for path in ours}
        try:
            for path, text in ours.items():
                path.write_text(text, encoding="utf-8")
            yield str(plan.resolve())
        finally:
            for path, content in before.items():
                path.write_bytes(content)

    def _splice_of(self, file: str) -> ModuleSplice:
        """Return both versions of a module. Raises DoesNotFit if only one version has it."""
        old, new = self.files[file]
        if old is None or new is None:
            where = "new" if new is None else "old"
            raise DoesNotFit(f"the {where} version has no {file}")
        try:
            return ModuleSplice(*(_read(path) for path in (old, new)))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise DoesNotFit(f"{file} cannot be read: {error}") from None

    def _write_plan(self, side: SideName, index: int) -> str:
        """Return the plan of a side as it is."""
        notes = self.folder / f"executed-{side}"
        watched = [str(root) for own in self.suspects for root in own.roots[index].values()]
        plan = ExchangePlan(attributes=self._attributes(index, ()))
        file = self.folder / f"plan-{side}.json"
        if watched and not notes.exists():
            plan = ExchangePlan({}, plan.attributes, watched, str(notes.resolve()))
            file = self.folder / f"plan-{side}-noted.json"
        plan.write(file)
        return str(file.resolve())

    def _attributes(self, index: int, changes: Sequence[Change]) -> dict[str, str]:
        return {
            own.name: own.values[0 if own in changes else index]
            for own in self.settings
            if own.is_attribute
        }

    def _set_variables(self, side: SideName, index: int, changes: Sequence[Change]) -> None:
        variables = {
            own.name: own.values[0 if own in changes else index]
            for own in self.settings
            if not own.is_attribute
        }
        own = self.surroundings[index]
        surroundings = Surroundings(own.folder, {**own.variables, **variables})
        self._commands.surroundings[side] = surroundings


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
