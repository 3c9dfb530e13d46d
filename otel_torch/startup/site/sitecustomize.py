"""What `otel-torch run` puts first on PYTHONPATH: starts us where no start-up file may be
installed, then steps aside.

An interpreter imports one `sitecustomize` only, the first on its path. This one therefore hands on
to the one that it hides, a program's or the distribution's own, and leaves nothing of itself on
`sys.path`.
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
        os.environ["OTEL_TORCH_ENABLED"] = (
            "off"  # said once, not by each process that this one starts
        )
    else:
        main()


def _hand_on() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start()
_hand_on()
