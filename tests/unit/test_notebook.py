"""The notebook of examples/ runs, and its results are what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "simulate.ipynb"


def test_the_notebook_runs_and_learns() -> None:
    """Its code cells in order, as a kernel would run them; a last expression is shown."""
    content = json.loads(NOTEBOOK.read_text())
    cells = ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    assert not any(c.get("outputs") for c in content["cells"]), "outputs are not kept"
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = [_run(cell, space) for cell in cells]
    run, found = space["run"], space["found"]
    assert run.history["loss_all"].iloc[-1] < 0.7 * run.history["loss_all"].iloc[0]
    assert list(run.model) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert run.clients["updates"].sum() == 300
    assert len(found.table) == 2
    assert found.table["loss"].is_monotonic_increasing
    tables = [value for value in shown if isinstance(value, pandas.DataFrame)]
    pictures = [value for value in shown if hasattr(value, "_repr_png_")]
    assert (len(tables), len(pictures)) == (3, 3)
    assert pictures[0]._repr_png_().startswith(b"\x89PNG")


def _run(cell: str, space: dict[str, Any]) -> object:
    import ast

    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), space)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), space)
