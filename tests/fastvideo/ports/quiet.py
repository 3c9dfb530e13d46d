"""FastVideo and its dependencies say much at import that is about GPUs; set before torch is
imported, this keeps it short.
"""

from __future__ import annotations

import os
import warnings


def quietly() -> None:
    """One thread, so that sums are always taken in the same order, and errors only."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("FASTVIDEO_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
