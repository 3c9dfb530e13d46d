"""Executes docs/notebooks and stores what they print: `make notebooks`."""

import os
import pathlib
import tempfile
from unittest import mock

import nbclient
import nbformat

NOTEBOOKS = sorted(pathlib.Path(__file__).with_name("notebooks").glob("*.ipynb"))


def execute(path):
    """Return a notebook with its outputs, executed in a folder and a kernel of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("OTEL_", "FASTVIDEO_"))
    }
    with tempfile.TemporaryDirectory() as folder:
        environ |= {"IPYTHONDIR": f"{folder}/.ipython", "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, environ, clear=True):
            nbclient.NotebookClient(
                notebook,
                kernel_name="python3",
                timeout=300,
                startup_timeout=300,
                record_timing=False,
                coalesce_streams=True,
                resources={"metadata": {"path": folder}},
            ).execute()
    notebook.metadata.pop("widgets", None)
    return notebook


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)
