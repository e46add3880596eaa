"""Execute the notebooks of docs/guide/, and store what they show: ``python -m tests.notebooks``.

As a module with a path, it executes one notebook and stores nothing: for the tests, to which warnings are errors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "guide"
TIMEOUT = 200
"""Seconds for one cell."""


def execute(path: Path) -> Any:
    """Return the notebook with the outputs of its cells, run in an empty folder. Raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    return notebook


def main() -> None:
    if len(sys.argv) == 2:
        execute(Path(sys.argv[1]))
        return
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}  # without the version of Python
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
        print(path)


if __name__ == "__main__":
    main()
