"""`otel-torch show`: a recording as a table, as a page of pictures, or as a trace for a viewer; none of it needs a server."""

from otel_torch.show.command import add_arguments, run

__all__ = ["add_arguments", "run"]
