"""Starts recording under `otel-torch run`, where no start-up file may be installed.

`otel-torch run` puts this folder first on PYTHONPATH. An interpreter imports only the first
`sitecustomize` on its path, so this one then runs the one that it hides, if any, and removes its
own folder from `sys.path`.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _start() -> None:
    if os.environ.get("OTEL_TORCH_ENABLED") != "1":
        return  # switched off since `otel-torch run` switched it on
    try:
        from otel_torch.startup import main
    except ImportError:
        print(
            f"otel_torch: not installed for {sys.executable}; the program runs on unrecorded",
            file=sys.stderr,
        )
        # Printed once, not by every process that this one starts.
        os.environ["OTEL_TORCH_ENABLED"] = "off"
    else:
        main()


def _run_hidden_sitecustomize() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start()
_run_hidden_sitecustomize()
