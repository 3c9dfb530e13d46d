"""A coarser dtype that only the port computes in: what it rounds is legal, so that a cast which
should not be there may hide in it. Its first line is worth a look.
"""

from __future__ import annotations

import numpy as np

from otel_torch.graph.graph import Graph
from otel_torch.parity.operations.labels import code_line


def warn_of_coarser_dtype(reference: Graph, port: Graph) -> str | None:
    """Return where the port first casts to a dtype coarser than all of the reference; None without.

    A port whose parameters or inputs have that dtype was meant to compute in it.
    """
    finest = reference.values.roundoff.max(initial=0.0)
    coarser = np.flatnonzero(port.values.roundoff > finest)
    if not len(coarser) or (port.values.maker[coarser] < 0).any():
        return None
    first = int(coarser[0])
    dtype = port.dtypes[port.values.dtype[first]].removeprefix("torch.")
    line = code_line(port, int(port.nodes.line[port.values.maker[first]]))
    where = "" if line is None else f", first at {line.place}"
    return (
        f"only the port computes in {dtype}{where}: what that rounds counts as legal. If it should "
        "not be there, mend it first"
    )
