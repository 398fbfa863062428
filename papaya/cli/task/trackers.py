"""The history of a task for trackers of experiments: TensorBoard, MLflow, Weights & Biases.

A step is a version, and its time is when the version was made. Unknown values are left out. The
libraries are optional: without one, the error names the extra to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from papaya.errors import OperatorError

HistoryRows = Sequence[dict[str, Any]]


def write_events(folder: Path, rows: HistoryRows) -> None:
    """Write a TensorBoard event file."""
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-untyped]
    except ImportError as error:
        raise _missing("tensorboardX", "tensorboard") from error
    folder.mkdir(parents=True, exist_ok=True)
    with SummaryWriter(str(folder)) as writer:
        for row in rows:
            for name, value in _known(row):
                writer.add_scalar(name, value, row["version"], walltime=row["created"])


def log_to_mlflow(uri: str, task: str, rows: HistoryRows) -> str:
    """Log a run of the experiment named after the task. Return the id of the run."""
    try:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise _missing("mlflow-skinny", "mlflow") from error
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(task)
        experiment = client.create_experiment(task) if found is None else found.experiment_id
        run = client.create_run(experiment, tags={"papaya.task": task}).info.run_id
        for row in rows:
            at_ms = round(1000 * row["created"])
            metrics = [Metric(n, float(v), at_ms, row["version"]) for n, v in _known(row)]
            client.log_batch(run, metrics=metrics)
        client.set_terminated(run)
    except MlflowException as error:
        raise OperatorError(
            f"MLflow at {uri}: {error}",
            hint="check the tracking URI: http://HOST:5000, sqlite:///FILE, or file:FOLDER",
        ) from error
    return str(run)


def log_to_wandb(project: str, task: str, rows: HistoryRows) -> str:
    """Log a run named after the task. Return its id."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", "wandb") from error
    try:
        with wandb.init(project=project, name=task, config={"papaya.task": task}) as run:
            for row in rows:
                run.log({"created": row["created"], **dict(_known(row))}, step=row["version"])
            return str(run.id)
    except wandb.Error as error:
        raise OperatorError(
            f"Weights & Biases: {error}", hint="log in (wandb login), or set WANDB_MODE=offline"
        ) from error


def _known(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name not in ("version", "created") and value is not None:
            yield name, value


def _missing(library: str, extra: str) -> OperatorError:
    return OperatorError(
        f"this needs {library}, which is not installed here",
        hint=f"pip install 'papaya-fl[{extra}]', or --output metrics.csv",
    )
