"""Compiled programs in bundles: a program file, with the settings of the manifest.

The program file (`papaya/learning/executorch/program_file.py`) has settings of its own, from the
time when it was compiled. Those in the manifest replace them, so that a revision needs no new
program. Refused: a program for another model, another batch size, other metrics or other frozen
tensors than the signed ones.
"""

from __future__ import annotations

from msgspec import structs

from papaya.bundle.manifest import TaskManifest
from papaya.config import MetricBounds
from papaya.errors import OperatorError
from papaya.learning.executorch.program_file import ProgramFile


def signed_program(program: ProgramFile, manifest: TaskManifest) -> ProgramFile:
    """The program with the settings of the manifest. OperatorError if they do not match."""
    header, client = program.header, manifest.client
    if header.manifest.tensors != manifest.layout:
        raise OperatorError("the program does not have the layout in the manifest", hint="")
    signed = manifest.frozen_blob
    if header.frozen_sha256 != (signed.sha256 if signed else ""):
        raise OperatorError(
            "the frozen tensors of the program are not those in the manifest", hint=""
        )
    if header.client.batch_size != client.batch_size:
        raise OperatorError(
            f"the program has a batch size of {header.client.batch_size}, "
            f"the manifest says {client.batch_size}",
            hint="the owner has to submit the task again",
        )
    if header.terms.metrics != manifest.metrics:
        raise OperatorError(
            f"the program has the metrics {_names(header.terms.metric_bounds)}, "
            f"the manifest says {_names(manifest.metric_bounds)}",
            hint="the owner has to submit the task again",
        )
    terms = structs.replace(header.terms, clip=manifest.clip, max_examples=client.max_examples)
    return structs.replace(program, header=structs.replace(header, client=client, terms=terms))


def _names(metrics: tuple[MetricBounds, ...]) -> list[str]:
    return [f"{metric.name} from {metric.low:g} to {metric.high:g}" for metric in metrics]
