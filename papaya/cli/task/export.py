"""`papaya task export` and `papaya task metrics`: a model or its history, for other tools.

A model is written under its tensors' own names: as safetensors, or as a PyTorch state_dict when
torch is there. The history is CSV, with times in ISO 8601, JSON or TensorBoard event files. What is
not there is not invented: a version without an evaluation has an empty loss, and a task with secure
aggregation no losses of the devices with much data, because nobody learns which those are.
"""

from __future__ import annotations

import argparse
import csv
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from papaya.cli.admin_client import AdminClient, add_connection, client_for, task_path
from papaya.cli.output import Commands, add_format, note, print_data, print_json, writing
from papaya.errors import OperatorError, ProtocolError
from papaya.learning import parameters
from papaya.learning.checkpoint_files import save_named
from papaya.learning.evaluation import EvaluationResult
from papaya.learning.parameters import Manifest, Vector
from papaya.messages.storage import PointRow
from papaya.server.admin.views import TaskDetail

_HEADER_BYTES = 1 << 17
_COLUMNS = ("version", "created", "members", "examples", "staleness", "loss", "perplexity")
_SHARES = ("p75_loss", "p99_loss")
_NO_VOLUMES = (
    "under secure aggregation no device says how much data it has: p75_loss and p99_loss are "
    "empty, and each update counts as one of examples"
)


def add_to(actions: Commands) -> None:
    parser = actions.add_parser("export", help="write a version as safetensors or state_dict")
    parser.set_defaults(run=run_export)
    parser.add_argument("task")
    parser.add_argument("--version", default="newest", metavar="V", help="a number, or newest")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="*.safetensors or *.pt"
    )
    add_connection(parser)
    add_format(parser)
    parser = actions.add_parser("metrics", help="write a task's history as CSV or for TensorBoard")
    parser.set_defaults(run=run_metrics)
    parser.add_argument("task")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, metavar="FILE", help="CSV; stdout when left out")
    where.add_argument("--tensorboard", type=Path, metavar="DIR", help="event files")
    add_connection(parser)
    add_format(parser)


def run_export(options: argparse.Namespace) -> int:
    output: Path = options.output
    if output.suffix not in (".safetensors", ".pt"):
        raise OperatorError(
            f"{output} is neither .safetensors nor .pt", hint="--output model.safetensors"
        )
    client = client_for(options)
    detail = client.get(task_path(options.task), TaskDetail)
    if detail.config.evaluates is not None:
        raise OperatorError(
            f"{options.task} is an evaluation, not a model", hint="export the task that it is of"
        )
    vector, version = _download(client, detail, options.version)
    manifest = Manifest(detail.manifest or (("parameters", (vector.size,)),))
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".pt":
            _save_state_dict(output, manifest, vector)
        else:
            metadata = {"format": "pt", "task": options.task, "version": version}
            save_named(output, manifest, vector, metadata)
    if options.format == "json":
        print_json({"task": options.task, "version": int(version), "file": str(output)})
    else:
        print_data(f"{output}: version {version} of {options.task}, {vector.size:,} parameters")
    return 0


def _download(client: AdminClient, detail: TaskDetail, version: str) -> tuple[Vector, str]:
    length = detail.config.model_length
    path = task_path(detail.task.task, "versions", version, "parameters")
    data, headers = client.download(path, 4 * length + _HEADER_BYTES)
    try:
        return parameters.decode(data, length), headers.get("papaya-version", version)
    except ProtocolError as error:
        raise OperatorError(
            f"what {client.url} sent is damaged: {error}", hint="try again; check its disk"
        ) from error


def _save_state_dict(output: Path, manifest: Manifest, vector: Vector) -> None:
    try:
        import torch

        from papaya.learning.torch.module import state_dict
    except ImportError as error:
        raise OperatorError(
            "a .pt file needs torch, which is not installed here",
            hint="pip install 'papaya-fl[torch]', or --output model.safetensors",
        ) from error
    partial = output.with_name(f".{output.name}.partial")
    try:
        torch.save(state_dict(manifest, vector), partial)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


# -- history ------------------------------------------------------------------------------------


def run_metrics(options: argparse.Namespace) -> int:
    client = client_for(options)
    is_secure = (
        client.get(task_path(options.task), TaskDetail).config.secure_aggregation is not None
    )
    rows = [_row(point, is_secure) for point in all_points(client, options.task)]
    if options.tensorboard is not None:
        with writing(options.tensorboard):
            _write_events(options.tensorboard, rows)
        note(f"{len(rows)} versions; look at them: tensorboard --logdir {options.tensorboard}")
    elif options.output is not None:
        with writing(options.output):
            options.output.write_text(as_csv(rows), encoding="utf-8")
        note(f"{options.output}: {len(rows)} versions")
    elif options.format == "json":
        print_json(rows)
    else:
        print_data(as_csv(rows).rstrip("\n"))
    if is_secure:
        note(_NO_VOLUMES)
    return 0


def all_points(client: AdminClient, task: str) -> list[PointRow]:
    """The whole history; the server gives a bounded number at a time."""
    points: list[PointRow] = []
    while True:
        after = f"?after={points[-1].version}" if points else ""
        more = client.get(task_path(task, f"points{after}"), tuple[PointRow, ...])
        if not more:
            return points
        points += more


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, (*_COLUMNS, *_SHARES), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "created": _iso_8601(row["created"])} for row in rows)
    return text.getvalue()


def _iso_8601(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return when.replace("+00:00", "Z")


def _row(point: PointRow, is_secure: bool) -> dict[str, Any]:
    row = {column: getattr(point, column) for column in _COLUMNS}
    result = None if is_secure else _result(point)
    shares = (None, None) if result is None else (result.p75.loss, result.p99.loss)
    return row | dict(zip(_SHARES, shares, strict=True))


def _result(point: PointRow) -> EvaluationResult | None:
    if not point.evaluated:
        return None
    try:
        return msgspec.json.decode(point.evaluated, type=EvaluationResult)
    except msgspec.DecodeError:
        return None  # of another version of Papaya: loss and perplexity are there all the same


def _write_events(folder: Path, rows: list[dict[str, Any]]) -> None:
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-untyped]
    except ImportError as error:
        raise OperatorError(
            "event files need tensorboardX, which is not installed here",
            hint="pip install 'papaya-fl[tensorboard]', or --output metrics.csv",
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    with SummaryWriter(str(folder)) as writer:
        for row in rows:
            for name, value in row.items():
                if name not in ("version", "created") and value is not None:
                    writer.add_scalar(name, value, row["version"], walltime=row["created"])
