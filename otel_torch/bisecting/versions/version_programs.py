"""One program between two versions: as it is with each, and with changes taken back."""

from __future__ import annotations

from collections import defaultdict
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
        self.files = {file: pair for own in suspects for file, pair in own.files.items()}
        sides = [side for own in suspects for side in own.roots]
        self._roots = [(root, name) for side in sides for name, root in side.items()]
        # in a repository of the user's own, files are exchanged where they are: in our work tree
        self._is_ours = {name for own in suspects if "" in own.roots.port for name in own.files}

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        """Run one side as it is, or with what is exchanged by `taken_back`."""
        if "exchange" not in settings:
            plan = self._set(side, self.folder / f"plan-{side}.json", (), {})
            settings = {**settings, "exchange": plan}
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
        folder = self.folder.resolve() / f"exchange-{self._exchanges}"
        names: defaultdict[str, set[str]] = defaultdict(set)
        for change in changes:
            if isinstance(change, CodePlace):
                names[change.file].add(change.name)
        texts = {file: self.splice_of(file).splice(own) for file, own in sorted(names.items())}
        sources: dict[str, str] = {}
        before: dict[Path, bytes] = {}
        try:
            for file, text in texts.items():
                path = self.files[file].port
                assert path is not None
                written = folder / file
                if file in self._is_ours:
                    before[path], written = path.read_bytes(), path
                else:
                    sources[str(path)] = str(written)
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(text, encoding="utf-8")
            yield self._set("port", folder / "plan.json", changes, sources)
        finally:
            for path, content in before.items():
                path.write_bytes(content)

    def _splice_of(self, file: str) -> ModuleSplice:
        """Return both versions of a module. Raises DoesNotFit if only one version has it."""
        old, new = self.files[file]
        if old is None or new is None:
            raise DoesNotFit(f"that only the {'old' if new is None else 'new'} version has")
        try:
            return ModuleSplice(old.read_text("utf-8"), new.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise DoesNotFit(f"that cannot be read ({error})") from None

    def _set(
        self, side: SideName, plan: Path, changes: Sequence[Change], sources: Mapping[str, str]
    ) -> str:
        """Set variables for the next run of a side, and write its plan; return the plan's file."""
        values = {
            x: getattr(x.values, "reference" if x in changes else side) for x in self.settings
        }
        own: Surroundings = getattr(self.surroundings, side)
        variables = {x.name: value for x, value in values.items() if not x.is_attribute}
        self._commands.surroundings[side] = Surroundings(own.folder, {**own.variables, **variables})
        attributes = {x.name: value for x, value in values.items() if x.is_attribute}
        notes = self.folder.resolve() / f"executed-{side}"
        watched = [str(x) for own in self.suspects for x in getattr(own.roots, side).values()]
        if notes.exists():  # the first run has noted it
            watched = []
        ExchangePlan(sources, attributes, watched, str(notes) if watched else None).write(plan)
        return str(plan.resolve())
