"""The scripts and styles of pages, which are files beside the code."""

from __future__ import annotations

from importlib.resources import files

LIBRARY = ("uPlot.min.js",)
SHARED = ("page.js", "scales.js", "heat_map.js", "curves.js")


def read_assets(package: str, *names: str) -> str:
    """Return the files of a package's folder `assets`, one after the other."""
    folder = files(package).joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def shared_assets(*names: str) -> str:
    return read_assets("otel_torch.rendering", *names)
