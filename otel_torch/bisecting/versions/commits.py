"""The commits that touch what changed, and work trees of two commits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from otel_torch.bisecting.versions.definitions import definitions_of
from otel_torch.bisecting.versions.environments import UnusableEnvironment
from otel_torch.bisecting.versions.ranking import CodePlace
from otel_torch.parity.sides import Sides

_MOST_COMMITS = 10
_FORMAT = "%h %ad %an: %s"


class CommitLog:
    """The history of a repository.

    Args:
        repository: A folder in its work tree.

    Raises:
        UnusableEnvironment: It is no repository.
    """

    def __init__(self, repository: Path) -> None:
        self.root = Path(_git(repository, "rev-parse", "--show-toplevel"))

    def touching(self, place: CodePlace, versions: Sides[str]) -> list[str]:
        """Return the commits between two versions that touch a definition, the last one first.

        A version is a commit or has a tag such as `v1.2.3`; without these all commits count.
        """
        ends = versions.map(self._commit_of)
        new = ends.port or "HEAD"
        try:
            files = _git(self.root, "ls-tree", "-r", "--name-only", new).splitlines()
            file = min((x for x in files if f"/{x}".endswith(f"/{place.file}")), key=len)
            source = _git(self.root, "show", f"{new}:{file}")
            definition = definitions_of(source).get(place.name)
            where = [new if ends.reference is None else f"{ends.reference}..{new}", "--", file]
            if definition is not None:
                where = ["-L", f"{definition.first},{definition.last}:{file}", where[0]]
            log = _git(self.root, "log", "-s", f"--format={_FORMAT}", "--date=short", *where)
        except (UnusableEnvironment, ValueError, SyntaxError):
            return []
        return log.splitlines()[:_MOST_COMMITS]

    def resolve(self, name: str) -> str:
        """Return the commit of a name. Raises UnusableEnvironment if there is none."""
        return _git(self.root, "rev-parse", "--verify", "--short", f"{name}^{{commit}}")

    def _commit_of(self, version: str) -> str | None:
        for name in (f"v{version}", version):
            with suppress(UnusableEnvironment):
                return self.resolve(name)
        return None

    @contextmanager
    def work_trees(self, commits: Sides[str], folder: Path) -> Iterator[Sides[Path]]:
        """Check out two commits beside each other in a folder, and take them away at the end."""
        trees = Sides(folder.resolve() / "commit-a", folder.resolve() / "commit-b")
        try:
            for tree, commit in zip(trees, commits, strict=True):
                _git(self.root, "worktree", "add", "--detach", "--force", str(tree), commit)
            yield trees
        finally:
            for tree in trees:
                if tree.exists():
                    _git(self.root, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise UnusableEnvironment(f"git: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        message = " ".join(error.stderr.split())
        raise UnusableEnvironment(f"git in {folder}: {message}") from None
    return done.stdout.strip("\n")
