"""`papaya task export` and `papaya task metrics`: a model or its history, for other tools.

A model keeps the names of its tensors: as safetensors, or as a PyTorch state_dict if torch is
installed. The history is CSV with times in ISO 8601 or JSON, or goes to an experiment tracker
(`papaya/cli/task/trackers.py`). Unknown values are empty: the loss of a version without an
evaluation, and under secure aggregation the results of the devices with the most data, because the
server does not learn which those are.
"""

from __future__ import annotations

import csv
import io
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from papaya.cli.admin_client import (
    AdminClient,
    OneTaskOptions,
    add_connection,
    client_for,
    task_path,
)
from papaya.cli.output import Commands, bind, note, print_data, print_json, writing
from papaya.cli.task import trackers
from papaya.config import TaskConfig
from papaya.errors import OperatorError, ProtocolError
from papaya.learning import parameters
from papaya.learning.checkpoint_files import save_named
from papaya.learning.evaluation import EvaluationResult, Share
from papaya.learning.parameters import Manifest, Vector
from papaya.messages.storage import PointRow
from papaya.server.admin.views import TaskDetail

_HEADER_BYTES = 1 << 17
_COLUMNS = ("version", "created", "members", "examples", "staleness", "loss")
_PERCENTILES = ("p75", "p99")
_NO_VOLUMES = (
    "under secure aggregation devices do not report how much data they have: the columns p75_ and "
    "p99_ are empty, and `examples` counts updates"
)


@dataclass(frozen=True, kw_only=True)
class TaskExportOptions(OneTaskOptions):
    output: Path
    version: str = "newest"


@dataclass(frozen=True, kw_only=True)
class TaskMetricsOptions(OneTaskOptions):
    output: Path | None = None
    tensorboard: Path | None = None
    mlflow: str | None = None
    wandb: str | None = None


def add_to(actions: Commands) -> None:
    exporting = actions.add_parser(
        "export",
        help="write a version as safetensors or PyTorch state_dict",
        description="Write a version of the model to a file, with the names of its tensors.",
    )
    exporting.add_argument("task", metavar="TASK", help="name of the task")
    exporting.add_argument("--version", metavar="V", help="version to export: a number, or newest")
    exporting.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write: *.safetensors, or *.pt for a PyTorch state_dict",
    )
    add_connection(exporting)
    bind(exporting, TaskExportOptions, run_export)
    metrics = actions.add_parser(
        "metrics",
        help="write the history of a task as CSV or JSON, or to an experiment tracker",
        description="Write one row for each version of a task: updates, staleness, loss, metrics. "
        "Each export to TensorBoard, MLflow or Weights & Biases is a run of its own.",
    )
    metrics.add_argument("task", metavar="TASK", help="name of the task")
    where = metrics.add_mutually_exclusive_group()
    where.add_argument(
        "--output", type=Path, metavar="FILE", help="CSV file to write (default: stdout)"
    )
    where.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="folder for TensorBoard event files"
    )
    where.add_argument(
        "--mlflow", metavar="URI", help="tracking URI of MLflow: a server's URL or sqlite:///FILE"
    )
    where.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="project of Weights & Biases; with WANDB_MODE=offline, files in the folder wandb",
    )
    add_connection(metrics)
    bind(metrics, TaskMetricsOptions, run_metrics)


def run_export(options: TaskExportOptions) -> int:
    output = options.output
    if output.suffix not in (".safetensors", ".pt"):
        raise OperatorError(
            f"{output} is neither .safetensors nor .pt", hint="--output model.safetensors"
        )
    if not output.parent.is_dir():  # before a long download
        hint = f"create it first: mkdir -p {output.parent}"
        raise OperatorError(f"there is no folder {output.parent}", hint=hint)
    client = client_for(options)
    detail = client.get(task_path(options.task), TaskDetail)
    if detail.config.evaluates is not None:
        raise OperatorError(
            f"{options.task} is an evaluation and has no model", hint="export the task it evaluates"
        )
    vector, version = _download(client, detail, options.version)
    manifest = Manifest(detail.manifest or (("parameters", (vector.size,)),))
    with writing(output):
        if output.suffix == ".pt":
            _save_state_dict(output, manifest, vector)
        else:
            metadata = {"format": "pt", "task": options.task, "version": version}
            save_named(output, manifest, vector, metadata)
    if options.is_json:
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
            f"the parameters that {client.url} sent are damaged: {error}",
            hint="try again; if it fails again, check the disk of the server",
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


def run_metrics(options: TaskMetricsOptions) -> int:
    client = client_for(options)
    config = client.get(task_path(options.task), TaskDetail).config
    rows = [_row(point, config) for point in all_points(client, options.task)]
    if options.tensorboard is not None:
        with writing(options.tensorboard):
            trackers.write_events(options.tensorboard, rows)
        install = "" if shutil.which("tensorboard") else "pip install tensorboard && "
        show = f"{install}tensorboard --logdir {options.tensorboard}"
        note(f"{len(rows)} versions; to see them: {show}")
    elif options.mlflow is not None:
        run = trackers.log_to_mlflow(options.mlflow, options.task, rows)
        note(f"{len(rows)} versions in run {run} of experiment {options.task}")
    elif options.wandb is not None:
        run = trackers.log_to_wandb(options.wandb, options.task, rows)
        note(f"{len(rows)} versions in run {run} of project {options.wandb}")
    elif options.output is not None:
        with writing(options.output):
            options.output.write_text(as_csv(rows), encoding="utf-8")
        note(f"{options.output}: {len(rows)} versions")
    elif options.is_json:
        print_json(rows)
    else:
        print_data(as_csv(rows).rstrip("\n"))
    if config.is_secure:
        note(_NO_VOLUMES)
    return 0


def all_points(client: AdminClient, task: str) -> list[PointRow]:
    """The whole history. The server returns a limited number of points per request."""
    points: list[PointRow] = []
    while True:
        after = f"?after={points[-1].version}" if points else ""
        more = client.get(task_path(task, f"points{after}"), tuple[PointRow, ...])
        if not more:
            return points
        points += more


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = rows[0] if rows else _COLUMNS
    writer = csv.DictWriter(text, tuple(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "created": _iso_8601(row["created"])} for row in rows)
    return text.getvalue()


def _iso_8601(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return when.replace("+00:00", "Z")


def metric_names(config: TaskConfig) -> list[str]:
    """The perplexity if the task asks for it, and its own metrics."""
    return [*["perplexity"] * config.perplexity, *(metric.name for metric in config.metrics)]


def _row(point: PointRow, config: TaskConfig) -> dict[str, Any]:
    """One version: its own numbers, then those of devices with much data."""
    row = {column: getattr(point, column) for column in _COLUMNS}
    names = metric_names(config)
    found = {"perplexity": point.perplexity} | point.metrics
    row |= {name: found.get(name) for name in names}
    result = None if config.is_secure else result_of(point)
    for percentile in _PERCENTILES:
        share: Share | None = getattr(result, percentile, None)
        values = {} if share is None else {"loss": share.loss, **share.metrics}
        own = ("loss", *(name for name in names if name != "perplexity"))
        row |= {f"{percentile}_{name}": values.get(name) for name in own}
    return row


def result_of(point: PointRow) -> EvaluationResult | None:
    """The complete result of an evaluation; None without one."""
    if not point.evaluated:
        return None
    try:
        return msgspec.json.decode(point.evaluated, type=EvaluationResult)
    except msgspec.DecodeError:
        return None  # written by another version of Papaya; the row still has loss and metrics
