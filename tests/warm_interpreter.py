"""An interpreter that has imported torch and our own package already and forks one copy of itself
for each program.

Importing them takes longer than most of the tests' programs run. `tests/interpreters.py` starts
this file once per pytest process, with the modules to import as arguments and a socket as standard
input. Each message on the socket is a program to run: its path, arguments, working directory and
environment, together with the file descriptors of its standard streams and of a socket for the
reply. The reply is the process id, then the exit status. The first argument is the descriptor of a
socket to which `forked_python.py` connects; such a connection brings one program, and gets its reply.

The forked copy is made to look like a fresh interpreter: modules that were imported early are
hidden until the program imports them, the start-up file of the package runs first, and the copy
waits for threads and calls exit functions as any interpreter does, because the program runs in the
main thread of the main module. Only where a request asks for it are all modules taken apart at the
end, too: that takes longer than most programs, since every page of theirs is copied for it.
"""

import array
import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

# the folder of this file has packages that are called like the standard library's, such as `statistics`
sys.path[0] = str(Path(__file__).parents[1])
# no `after_import` waits for a submodule of these packages, so they become visible all at once
SHOWN_AT_ONCE = (
    "numpy", "pandas", "requests", "scipy", "sklearn", "torch", "torchmetrics", "torchvision",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
START_UP_FILE = ROOT / "packaging" / "otel_torch.pth"
PACKAGE = "otel_torch"
# what recorded programs and commands import, which reads no variable while it is imported
ROOMS_WITHOUT_TORCH = ("process", "recording", "telemetry")
COMMANDS = ("bisecting", "cli", "graph", "parity", "rendering", "show")
ROOMS = (*ROOMS_WITHOUT_TORCH, *COMMANDS, "frameworks", "laws", "regions", "sources", "statistics")

LARGE_PAGE = 1 << 21
MADV_COLLAPSE = 25  # of linux/mman.h


def is_of_the_package(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def loaded_since(before: Container[str]) -> list[str]:
    """Return the names of the modules that were not loaded before, but the standard library's."""
    return [
        module
        for module in sys.modules
        if module not in before and module.partition(".")[0] not in sys.stdlib_module_names
    ]


def modules_of_the_package() -> Iterator[str]:
    """Yield the names of the modules that this interpreter imports, and with torch the one that starts a session."""
    for room in ROOMS if "torch" in sys.modules else ROOMS_WITHOUT_TORCH:
        for file in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            if file.stem not in ("__init__", "triton_kernel"):  # the latter imports Triton
                yield ".".join(file.relative_to(ROOT).with_suffix("").parts)
    if "torch" in sys.modules:
        yield f"{PACKAGE}.bootstrap"


class EarlyImports:
    """Imports modules early and hides them until the program imports them; a finder on
    `sys.meta_path`.

    A program that imports torch must still go through `sys.meta_path`, because that is where the
    session starts. Importing any module of a group makes the whole group visible again. Those of
    our own package become visible one by one, each with what it imports, as they would be loaded.
    """

    def __init__(self) -> None:
        self._imported_by: dict[str, list[str]] = {}  # modules of our own package
        self._modules: dict[str, types.ModuleType] = {}
        self._groups: dict[str, list[str]] = {}
        self._loaders: dict[str, object] = {}

    def load(self, name: str) -> None:
        """Import a module; it and all that it loads are one group."""
        before = set(sys.modules)
        importlib.import_module(name)
        self._groups[name] = loaded_since(before)

    def load_package(self) -> None:
        """Import modules of our own package, and note what each of them imports."""
        before = set(sys.modules)
        with self._imports_noted():
            for name in modules_of_the_package():
                importlib.import_module(name)
        self._groups[PACKAGE] = []
        for name in loaded_since(before):
            if is_of_the_package(name):
                self._imported_by.setdefault(name, [])
            else:
                self._groups[PACKAGE].append(name)

    @contextmanager
    def _imports_noted(self) -> Iterator[None]:
        load = builtins.__import__

        def load_and_note(name, globals=None, locals=None, fromlist=(), level=0):
            module = load(name, globals, locals, fromlist, level)
            importer = (globals or {}).get("__name__", "")
            if is_of_the_package(importer):
                names = (name, *(f"{name}.{each}" for each in fromlist or ()))
                imports = self._imported_by.setdefault(importer, [])
                imports += [each for each in names if each in sys.modules]
            return module

        builtins.__import__ = load_and_note
        try:
            yield
        finally:
            builtins.__import__ = load

    def hide(self) -> None:
        for names in (*self._groups.values(), self._imported_by):
            for name in names:
                self._modules[name] = sys.modules.pop(name)
        for parent, _, child in (name.rpartition(".") for name in self._imported_by):
            if parent:
                vars(self._modules[parent]).pop(child, None)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = getattr(self._modules.get(name), "__spec__", None)
        if spec is not None:
            self._loaders.setdefault(name, spec.loader)
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        imported = module.__name__
        module.__spec__.loader = module.__loader__ = self._loaders[imported]
        for name in self._imported_by.get(imported, ()):
            importlib.import_module(name)
        for group, names in list(self._groups.items()):
            if imported in names:
                self._show(group, imported.partition(".")[0])

    def _show(self, group: str, package: str) -> None:
        """Make a group visible; of a dependency, only that package."""
        names = self._groups[group]
        if package == group.partition(".")[0]:
            shown = self._groups.pop(group)
        else:
            shown = [name for name in names if name.partition(".")[0] == package]
            self._groups[group] = [name for name in names if name not in shown]
        for name in shown:
            if package in SHOWN_AT_ONCE or self._modules[name].__spec__ is None:
                sys.modules.setdefault(name, self._modules[name])
            else:
                importlib.import_module(name)


def receive(control: socket.socket) -> tuple[dict, list[int]] | None:
    """Return the next request and its file descriptors, or None when the tests have ended."""
    message, ancillary, _, _ = control.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 4))
    if not message:
        return None
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return json.loads(message), list(descriptors)


def serve(control: socket.socket, listener: socket.socket) -> tuple[dict, list[int]] | None:
    """Fork a copy for each request until the tests end; return the request in the copy."""
    running: dict[int, tuple[int, int]] = {}  # by file descriptor of the process: its id, the reply
    connected: dict[int, int] = {}  # by the descriptor of a connection: the process
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll()[:1]:  # what the first one closes may be among the others
            if descriptor in connected:  # who asked was killed
                poll.unregister(descriptor)
                os.killpg(connected.pop(descriptor), signal.SIGKILL)
            elif descriptor in (control.fileno(), listener.fileno()):
                asked = control if descriptor == control.fileno() else listener.accept()[0]
                request = receive(asked)
                if request is None:
                    return None
                if asked is not control:
                    request[1].append(asked.detach())
                streams, reply = request[1][:3], request[1][3]
                pid = os.fork()
                if pid == 0:
                    replies = [pending for _, pending in running.values()]
                    sockets = control.detach(), listener.detach()
                    for inherited in (*sockets, reply, *running, *replies):
                        os.close(inherited)
                    return request[0], streams
                if asked is not control:
                    connected[reply] = pid
                    poll.register(reply, 0)
                    os.setpgid(pid, pid)
                os.write(reply, f"{pid}\n".encode())
                process = os.pidfd_open(pid)
                running[process] = pid, reply
                poll.register(process, select.POLLIN)
                for stream in streams:
                    os.close(stream)
            else:
                pid, reply = running.pop(descriptor)
                if connected.pop(reply, None):
                    poll.unregister(reply)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                poll.unregister(descriptor)
                try:
                    os.write(reply, f"{status}\n".encode())
                except BrokenPipeError:
                    pass  # the test has timed out
                os.close(descriptor)
                os.close(reply)


def put_on_large_pages() -> None:
    """Put the memory of this process on pages of 2 MB where the kernel can: a fork copies the table of its pages,
    and for a process with torch that is most of its cost.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    advise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        addresses, access, _, _, _, *file = line.split()
        if access == "rw-p" and file in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(
                -(-first // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE
            ):
                advise(ctypes.c_void_p(page), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)


def become(request: dict, streams: list[int]) -> None:
    """Turn this copy into what a fresh interpreter would be when it starts `request`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR2, file=2)  # `tests/interpreters.py` asks where it hangs
    # after the interpreter has ended: skip the destructors of libtorch, which take 0.2 s
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)
    tempfile.tempdir = None
    if numpy_random is not None:
        numpy_random.seed()  # the fork seeds the module `random` itself
    sys.executable = request["executable"]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    if sys.argv[0] == "-m":
        del sys.argv[1]
        sys.path[0] = os.getcwd()
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[1:1] = request["added_folders"]


def end(status: object) -> None:
    """End as an interpreter does, but for taking all modules apart."""
    for finalizer in early_finalizers:
        finalizer.atexit = False  # torch takes back its operators, one by one
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


def run(argv: list[str], is_taken_apart: bool) -> None:
    """Run a script, or `-m` and a module, as the main module; print a traceback without this file's frames."""
    script = os.path.abspath(argv[0])
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    try:
        if argv[0] == "-m":
            runpy._run_module_as_main(argv[1])
        else:
            exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
    except SystemExit as error:
        if is_taken_apart:
            raise
        end(error.code)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # the traceback begins at the script
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
        sys.exit(1) if is_taken_apart else end(1)
    if not is_taken_apart:
        end(0)


if __name__ == "__main__":
    gc.disable()  # imports leave no garbage
    early = EarlyImports()
    for name in sys.argv[2:]:
        early.load(name)
    early.load_package()
    early_finalizers = list(weakref.finalize._registry)
    numpy_random = sys.modules.get("numpy.random")
    early.hide()
    gc.collect()
    gc.enable()
    gc.freeze()  # copies share what was imported, and their collections pass it over
    put_on_large_pages()
    accepted = serve(socket.socket(fileno=0), socket.socket(fileno=int(sys.argv[1])))
    if accepted is None:
        os._exit(0)
    become(*accepted)
    exec(START_UP_FILE.read_text(), {})
    if any(Path(each, "sitecustomize.py").exists() for each in accepted[0]["added_folders"]):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    run(accepted[0]["argv"], accepted[0]["is_taken_apart"])
