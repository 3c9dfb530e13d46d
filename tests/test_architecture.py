"""The code keeps the structure that docs/architecture.md draws: which room imports which, what stays
light to import, and where the documented changes are made.
"""

import ast
import collections
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "otel_torch"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def documented_rooms() -> dict[str, set[str]]:
    """Return each room of the page's table with the rooms that it may import."""
    table = PAGE.split("<!-- rooms -->")[1].split("<!-- end of rooms -->")[0]
    allowed = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for room in re.findall(r"`(\w+)`", cells[0]):
            allowed[room] = set(re.findall(r"`(\w+)`", cells[2]))
    return allowed


def room_of(path: pathlib.Path) -> str:
    """Return the folder below the package, or the module itself for a file at the root."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def type_checking_nodes(tree: ast.AST) -> set[int]:
    """Return the ids of all nodes under `if TYPE_CHECKING:`."""
    guarded: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            guarded |= {id(child) for child in ast.walk(node)}
    return guarded


def imported_rooms(tree: ast.AST) -> set[str]:
    """Return the rooms that a module imports at run time, wherever in the file."""
    rooms = set()
    guarded = type_checking_nodes(tree)
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "otel_torch":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("otel_torch."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            rooms |= {parts[1] for parts in names if parts[0] == "otel_torch" and len(parts) > 1}
    return rooms - {"__version__"}


@functools.cache
def room_imports() -> dict[str, dict[str, str]]:
    """Return, for each room, the rooms it imports, each with a file that does."""
    imports: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        for imported in imported_rooms(ast.parse(path.read_text())) - {room}:
            imports[room].setdefault(imported, str(path.relative_to(ROOT)))
    return imports


def test_every_room_is_documented():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert set(documented_rooms()) == rooms


def test_rooms_import_only_what_the_page_allows():
    allowed = documented_rooms()
    violations = [
        f"{path}: {room} imports {imported}"
        for room, imported_by in room_imports().items()
        if room not in ("__init__", "__main__")
        for imported, path in imported_by.items()
        if imported not in allowed[room]
    ]
    assert violations == []


def test_the_page_allows_no_import_that_is_not_made():
    imports = room_imports()
    unused = {
        room: sorted(allowed - set(imports[room]))
        for room, allowed in documented_rooms().items()
        if allowed - set(imports[room])
    }
    assert unused == {}


def test_rooms_form_no_cycle():
    remaining = {room: set(imports) for room, imports in documented_rooms().items()}
    while leaves := {room for room, imports in remaining.items() if not imports & set(remaining)}:
        remaining = {room: imports for room, imports in remaining.items() if room not in leaves}
    assert remaining == {}


# ---- shelves

# what tests several rooms together, or is no test
BESIDE_THE_ROOMS = {
    "benchmarks", "chaos", "corpora", "e2e", "fastvideo", "pages", "programs", "reports",
}  # fmt: skip


def documented_shelves() -> list[tuple[str, str]]:
    """Return the room and name of each shelf in the page's table, in order."""
    table = PAGE.split("<!-- shelves -->")[1].split("<!-- end of shelves -->")[0]
    shelves, room = [], ""
    for line in table.splitlines():
        first, shelf, *_ = [*re.findall(r"\| *(`\w+`)? *(?=\|)", line), "", ""]
        room = first.strip("`") or room
        if shelf:
            shelves.append((room, shelf.strip("`")))
    return shelves


def folders(root: pathlib.Path) -> set[pathlib.Path]:
    """Return all folders with Python files, relative to `root`."""
    return {path.parent.relative_to(root) for path in root.rglob("*.py")}


def test_every_shelf_is_documented():
    nested = {folder.parts for folder in folders(PACKAGE) if len(folder.parts) == 2}
    assert set(documented_shelves()) == nested - {("startup", "site")}


def test_shelves_of_sources_import_only_those_above():
    order = [shelf for room, shelf in documented_shelves() if room == "sources"]
    violations = []
    for path in sorted((PACKAGE / "sources").rglob("*.py")):
        shelf = path.relative_to(PACKAGE / "sources").parts[0]
        allowed = order[: order.index(shelf) + 1] if shelf in order else []
        tree = ast.parse(path.read_text())
        guarded = type_checking_nodes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in guarded:
                imported = re.match(r"otel_torch\.sources\.(\w+)", node.module or "")
                if imported and imported[1] in order and imported[1] not in allowed:
                    violations.append(f"{path.name} of {shelf} imports {node.module}")
    assert violations == []


def test_folders_are_small():
    listed = [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]
    files = collections.Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in listed
        if path.suffix in (".py", ".c", ".h", ".js", ".css") and path.name != "__init__.py"
    )
    assert {folder for folder, count in files.items() if count > 25} <= {"otel_torch/parity"}


def test_tests_stand_where_what_they_test_stands():
    rooms = folders(PACKAGE) | {pathlib.Path()}
    astray = {
        folder
        for folder in folders(ROOT / "tests") - rooms
        if not {*folder.parts} & BESIDE_THE_ROOMS
    }
    assert astray == set()


HEAVY = ("torch", "numpy", "opentelemetry", "msgspec", "pandas", "duckdb", "safetensors")
# what a module may load of the heavy libraries; everything else in HEAVY it must not
LIGHT_IMPORTS = {
    "otel_torch": (),
    "otel_torch.startup": (),
    "otel_torch.cli.main": (),
    "otel_torch.settings": (),
    "otel_torch.records": (),
    "otel_torch.recorder": (),
    "otel_torch.regions.registry": (),
    "otel_torch.recording.reader": ("msgspec",),
    "otel_torch.recording.recording_sink": ("msgspec",),
    "otel_torch.parity.diff": ("msgspec", "numpy"),
    "otel_torch.show.overview": ("msgspec",),
    "otel_torch.show.chrome_trace": ("msgspec",),
    "otel_torch.exporting.targets": ("msgspec",),
    "otel_torch.exporting.parquet": ("msgspec",),
}


@pytest.mark.parametrize("module", LIGHT_IMPORTS)
def test_importing_a_light_module_loads_no_heavy_library(module):
    heavy = [name for name in HEAVY if name not in LIGHT_IMPORTS[module]]
    program = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


def test_the_places_of_documented_changes_exist():
    section = PAGE.split("## Where to make a change")[1].split("\n## ")[0]
    paths = re.findall(r"`((?:otel_torch|tests|docs|collector-config)/[\w./-]+)`", section)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_class_names_are_used_once():
    names: dict[str, list[str]] = collections.defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}
