"""Run the cells of a notebook in this process, as a kernel would, and print their outputs as JSON.

`python notebook.py NOTEBOOK`: each cell is executed by exec, and the value of its last expression is shown.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def read_cells(path: Path) -> list[str]:
    """Return the source of each code cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> str:
    """Execute a cell and return its output: stdout, stderr, warnings, and the value of the last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace) if last else None
        if value is not None:
            print(repr(value))
    return output.getvalue()


def run_in_kernel(path: Path) -> list[str]:
    """Run a notebook with nbclient, and return the output of each code cell."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1800, kernel_name="python3").execute()
    outputs = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            outputs.append("\n".join(texts))
    return outputs


if __name__ == "__main__":
    names: dict[str, Any] = {"__name__": "__main__"}
    found = [run_cell(cell, names) for cell in read_cells(Path(sys.argv[1]))]
    print(json.dumps(found))
