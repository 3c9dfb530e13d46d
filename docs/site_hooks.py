"""Adds pages of the commands, the public names and the notebooks to the site, and the files that docs/ links to.

mkdocs calls the functions `on_…` (mkdocs.yml).
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import posixpath
import re
from unittest import mock

import otel_torch
from otel_torch.cli.main import COMMANDS, make_parser

ROOT = pathlib.Path(__file__).parents[1]
# outside of docs/, and linked from there: the site has them below source/
LINKED = (
    "collector-config",
    "examples",
    "otel_torch/SKILL.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "constraints.txt",
)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def help_of(command: str) -> str:
    """Return what `otel-torch COMMAND --help` prints."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="80"),  # argparse breaks its lines there
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        make_parser(command).parse_args([command, "--help"])
    return printed.getvalue()


def make_commands() -> str:
    """Return the page of all commands."""
    sections = (f"\n## otel-torch {name}\n\n```text\n{help_of(name)}```\n" for name in COMMANDS)
    return "# Commands\n\nWhat `otel-torch COMMAND --help` prints.\n" + "".join(sections)


def make_api() -> str:
    """Return the page of all public names, whose docstrings mkdocstrings reads."""
    names = [name for name in otel_torch.__all__ if not name.startswith("_")]
    sections = (f"\n::: otel_torch.{name}\n" for name in names)
    return "# Python API\n\nThe public names of `otel_torch`.\n" + "".join(sections)


def make_notebook(path: pathlib.Path) -> str:
    """Return the page of an executed notebook: its text, its code, and what that printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *map(show_output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def show_output(output: dict) -> str:
    """Return the richest form of an output that a page can show."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "text/html" in data:
        return f"<div>\n{data['text/html']}\n</div>"
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
    text = data.get("text/plain") or "".join(output["text"])
    return f"```text\n{text.rstrip()}\n```"


MADE = {"commands.md": make_commands, "api.md": make_api} | {
    f"notebooks/{path.stem}.md": functools.partial(make_notebook, path) for path in NOTEBOOKS
}


def site_link(link: str, page: str) -> str:
    """Return the link as the site needs it: a notebook is a page there.

    Args:
        link: A path relative to the page's place in the repository.
        page: The page's place in the site.

    >>> site_link("../examples/quickstart.py", "diff.md")
    'source/examples/quickstart.py'
    >>> site_link("notebooks/port-bug.ipynb", "README.md")
    'notebooks/port-bug.md'
    >>> site_link("docs/promises.md", "source/SECURITY.md")
    '../promises.md'
    """
    origin = page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    place = target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"
    place = re.sub(r"^(notebooks/.*)\.ipynb$", r"\1.md", place)
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


def on_config(config):
    """Give headings the anchors that they have in the repository's own view."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files, config):
    """Add the pages that are made here, and the linked files."""
    from mkdocs.structure.files import File

    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    for linked in LINKED:
        below = sorted((ROOT / linked).rglob("*")) or [ROOT / linked]
        for path in below:
            if path.is_file() and path.suffix != ".pyc":
                place = f"source/{path.relative_to(ROOT).as_posix()}"
                files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Lead links to files outside of docs/ to their copies."""
    return LINK.sub(lambda match: site_link(match[1], page.file.src_uri), markdown)
