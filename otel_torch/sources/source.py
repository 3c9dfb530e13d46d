"""The common lifecycle of everything that watches the program.

A session keeps its sources in one list: it installs them in order and uninstalls them in reverse.
"""

from __future__ import annotations


class Source:
    """Watches the program for one session. A source overrides the methods that it needs."""

    def install(self) -> None:
        """Start watching."""

    def forked(self) -> None:
        """Drop what belongs to the parent: called in a forked child, in its only thread."""

    def finish(self) -> None:
        """Report, in one line each, what the user should know at the end of the program.

        Called before `uninstall`, and only if a forward ran.
        """

    def uninstall(self) -> None:
        """Stop watching, and leave nothing on torch or on the program's modules."""
