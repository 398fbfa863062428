"""`papaya task submit my_task.py`: start a task from the owner's file.

The file is imported here, on the owner's machine. With an owner's key the command signs the task
and sends its files in a bundle, or, for devices without torch, the program that it compiles from
them: devices that have pinned the key train it, and need no file. The server stores the bundle and
runs nothing of it. Without a key only the file's hash is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.head import COMPILED_FILE, PROGRAM_FILE
from papaya.cli.admin_client import (
    AdminClient,
    ConnectionOptions,
    add_connection,
    add_reason,
    client_for,
    task_path,
)
from papaya.cli.output import Commands, bind, note, plural, print_data, print_json, whole
from papaya.cli.task.privacy import earlier_terms, privacy_in_words
from papaya.cli.task.signing import (
    BundleBlobs,
    OwnerSigner,
    default_key,
    first_manifest,
    program_files,
    run_of,
    signer,
)
from papaya.config import TaskConfig
from papaya.device.executor import EngineName
from papaya.errors import OperatorError
from papaya.learning.settings import GivenSettings, changed, with_client
from papaya.progress import elapsed
from papaya.server.admin.views import NewTask, Stored, TaskView

if TYPE_CHECKING:
    from papaya.learning.task import LoadedTask


@dataclass(frozen=True, kw_only=True)
class TaskSubmitOptions(ConnectionOptions):
    file: Path
    engine: EngineName = "torch"
    program: Path | None = None
    checkpoint: Path | None = None
    name: str | None = None
    seed: int = 0
    set: Sequence[str] = ()
    owner: Path | None = None  # None: the default key, if it exists
    unsigned: bool = False
    replace: bool = False
    why: str = ""


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "submit",
        help="start a task from a Python file",
        description="Start a task from a Python file that ends in `task = Task(...)`.",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="TASK.py",
        help="Python file of the task, or a folder with a task.py and the files that it imports",
    )
    parser.add_argument(
        "--engine",
        choices=get_args(EngineName),
        help="what devices train with: the files themselves (torch), or a program that is compiled "
        "from them (executorch), on devices without torch",
    )
    parser.add_argument(
        "--program",
        type=Path,
        metavar="FILE",
        help="program that `papaya task compile` made from the file, instead of compiling it; "
        "implies --engine executorch",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="safetensors file with the initial parameters (default: a new model)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of the task (default: the name in the file)"
    )
    parser.add_argument("--seed", type=whole(0), metavar="S", help="seed of the initial parameters")
    parser.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="change one setting, such as concurrency=50, regime=sync, stop.versions=100 or, in a "
        "signed task, client.rate=0.05; may be repeated",
    )
    parser.add_argument(
        "--owner",
        type=Path,
        metavar="FILE",
        help=f"sign with the key in this file (default: {default_key()}, if it exists)",
    )
    parser.add_argument(
        "--unsigned",
        action="store_true",
        help="do not sign: only devices that have the same task file take part",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="cancel the current run of this task, if there is one",
    )
    add_reason(parser)
    add_connection(parser)
    bind(parser, TaskSubmitOptions, run)


class SubmittedFile(NamedTuple):
    """A task file, with the settings of the client that were given. `compiled`: its program for
    devices without torch. `file`: the settings of the task that it has. `config`: with those given.
    """

    loaded: LoadedTask
    compiled: bytes | None
    file: TaskConfig
    config: TaskConfig


def run(options: TaskSubmitOptions) -> int:
    client = client_for(options)
    found = _signer(options)
    task = _with_settings(options, is_signed=found is not None)
    for warning in _warnings(options, task, is_signed=found is not None):
        note(f"warning: {warning}")
    config, bundle = task.config, b""
    if config.rounding_error is not None:
        note(config.rounding_error_in_words)
    if config.privacy is not None:
        earlier = [] if found is None else earlier_terms(client, config.task, found.owner)
        for line in privacy_in_words(config, earlier):
            note(line)
    if found is not None:
        blobs = bundle_blobs(options.file, task.loaded, task.compiled)
        config, bundle = _bundled(client, found, task.loaded, config, blobs)
    new = NewTask(
        config,
        _send_model(client, options, task.loaded, config),
        task.loaded.manifest.tensors,
        bundle,
        options.replace,
        options.why,
    )
    view = client.post("/admin/tasks", new, TaskView)
    if options.is_json:
        print_json(view)
    else:
        _print(options, task, view, "" if found is None else found.owner)
    return 0


def _with_settings(options: TaskSubmitOptions, *, is_signed: bool) -> SubmittedFile:
    given = GivenSettings.of(options.set)
    if given.client and not is_signed:
        raise OperatorError(
            f"--set client.{given.client[0]}: devices of an unsigned task use the settings in "
            "their own file",
            hint="change the file, or sign the task: papaya owner key",
        )
    written = loaded_from(options.file)
    loaded = with_client(written, given.client)
    loaded.try_loop(loaded.task.sample, "`sample`")
    batch_size = loaded.task.client.batch_size
    compiled = _compiled(options, written, batch_size, is_signed=is_signed)
    file = config_in(loaded, compiled)
    return SubmittedFile(loaded, compiled, file, changed(file, options.name, given.task))


def _warnings(options: TaskSubmitOptions, task: SubmittedFile, *, is_signed: bool) -> Iterator[str]:
    yield from task.config.warnings()
    if not task.loaded.task.sample:
        yield (
            f"{options.file} has no `sample`: nothing was tried on an example, so a mistake shows "
            "only on devices; add sample=[...] with a few stored examples"
        )
    if task.config.privacy is not None and task.loaded.task.keeps_tensors:
        yield (
            "a private task with personal tensors: devices decline it if budget.window_s of the "
            "collection in their policy is shorter than twice its max_age_s (docs/privacy.md)"
        )
    if not is_signed:
        yield from refusals(task.file, task.config)
        if task.config.task != task.loaded.task.name:
            yield _renamed(task.loaded.task.name, task.config.task)


def _send_model(
    client: AdminClient, options: TaskSubmitOptions, loaded: LoadedTask, config: TaskConfig
) -> str:
    """Send the initial parameters. Returns the key under which the server keeps them."""
    from papaya.learning import parameters

    vector = loaded.initial_parameters(seed=options.seed, checkpoint=options.checkpoint)
    data = parameters.encode(vector, {"task": config.task, "version": "0"})
    note(f"sending {config.model_length:,} parameters")
    place = task_path(config.task, f"parameters?model_length={config.model_length}")
    return client.put(place, data, Stored).parameters


def _print(options: TaskSubmitOptions, task: SubmittedFile, view: TaskView, owner: str) -> None:
    """`owner`: empty if the task is not signed."""
    if owner:
        collection, engine = task.loaded.task.examples.collection, task.config.requirements.engine
        note(
            f"signed by owner {owner}: devices train this task if they have pinned this "
            f"owner and allow collection {collection} and engine {engine}"
        )
        note(f"id of this run in lists, logs and metrics: {view.task}")
    clients, name = plural(task.config.concurrency, "client"), view.name or view.task
    print_data(f"{name} is {view.state}: {clients} at a time")
    note(options.repeated(f"\nto watch it: papaya task watch {name}"))


def loaded_from(path: Path) -> LoadedTask:
    """The task in a file, or in a folder with a task.py and the files that it imports."""
    from papaya.learning.task import load_task  # here: it imports torch

    if path.is_file() and path.suffix != ".py":
        raise OperatorError(
            f"{path}: a task file is a Python file (.py)",
            hint=f"give the file that defines `task`, or a folder with a {PROGRAM_FILE}",
        )
    if not path.is_dir():
        return load_task(path)
    sys.path.insert(0, str(path))  # as on devices: its files import each other
    return load_task(path / PROGRAM_FILE)


def config_in(loaded: LoadedTask, compiled: bytes | None) -> TaskConfig:
    """The settings in a task file, for devices that train it or the program made from it."""
    from papaya.learning.executorch.program_file import decode_program

    return loaded.config() if compiled is None else loaded.config_for(decode_program(compiled))


def _signer(options: TaskSubmitOptions) -> OwnerSigner | None:
    path = options.owner or default_key()
    if options.unsigned:
        return None
    if options.owner is None and not path.exists():
        what = "task file" if options.program is None else "program"
        note(f"not signed: only devices that have the same {what} take part")
        note("to reach devices without it, create a key: papaya owner key")
        return None
    return signer(path)


def _compiled(
    options: TaskSubmitOptions, written: LoadedTask, batch_size: int, *, is_signed: bool
) -> bytes | None:
    """The program file for devices without torch; None for devices that train the task's files."""
    from papaya.learning.executorch.program_file import read_program

    if options.program is not None:
        read_program(options.program)
        return options.program.read_bytes()
    if options.engine == "torch":
        return None
    if not is_signed:
        raise OperatorError(
            "an unsigned task reaches only devices that have its program",
            hint=f"papaya task compile {options.file}, give the program to the devices, and submit "
            "the task with --program FILE; or create a key: papaya owner key",
        )
    return compiled_program(options.file, written, batch_size)


def compiled_program(path: Path, written: LoadedTask, batch_size: int) -> bytes:
    """The program of a task as it is written in its file, but for the batch size. Devices take all
    other settings of the client's training from the manifest.
    """
    from papaya.learning.executorch.shim import cache_folder
    from papaya.learning.torch.export import compile_task  # imports executorch

    note("compiling (ten seconds to a few minutes, unless the result is cached)")
    content = archive.digest(archive.pack(program_files(path)))
    client = structs.replace(written.task.client, batch_size=batch_size)
    task = structs.replace(written.task, client=client)
    with elapsed("compiling"):
        return compile_task(replace(written, task=task), cache_folder() / "programs", content)


def bundle_blobs(path: Path, loaded: LoadedTask, compiled: bytes | None) -> BundleBlobs:
    """What devices fetch: the task's files, or the program that was compiled from them."""
    from papaya.learning.executorch.program_file import decode_program

    if compiled is None:
        return BundleBlobs(archive.pack(program_files(path)), loaded.frozen_file())
    from papaya.learning.torch.export import program_tensors

    tensors = program_tensors(loaded, decode_program(compiled).header.file_names)
    return BundleBlobs(archive.pack({COMPILED_FILE: compiled}), tensors)


def _bundled(
    client: AdminClient,
    found: OwnerSigner,
    loaded: LoadedTask,
    config: TaskConfig,
    blobs: BundleBlobs,
) -> tuple[TaskConfig, bytes]:
    """Store the blobs and sign the manifest. Returns the settings of the new run."""
    manifest = first_manifest(found.owner, loaded, config, blobs)
    run = run_of(manifest)
    program = client.put(task_path(run, "program"), blobs.program, Stored).parameters
    frozen = ""
    if blobs.frozen:
        note(f"sending {len(blobs.frozen):,} bytes of frozen tensors")
        frozen = client.put(task_path(run, "frozen"), blobs.frozen, Stored).parameters
    return structs.replace(config, task=run), found.head(manifest, program, frozen)


def _renamed(file: str, submitted: str) -> str:
    return (
        f"the file names its task {file}. Start its devices with --alias {submitted}={file}; "
        f"otherwise they are assigned to {submitted} too and leave it, which slows {file} down"
    )


def refusals(file: TaskConfig, submitted: TaskConfig) -> list[str]:
    """Warnings about settings that devices with the unchanged file will refuse."""
    if file.secure_aggregation is None and submitted.secure_aggregation is None:
        return []
    if file.secure_aggregation is None or submitted.secure_aggregation is None:
        found = ["secure aggregation differs from the file"]
    else:
        found = [
            f"{name} = {ours}, but the file has {theirs}"
            for name, ours, theirs in (
                ("clip", submitted.clip, file.clip),
                ("max_examples", submitted.max_examples, file.max_examples),
                ("max_staleness", submitted.max_staleness, file.max_staleness),
                ("privacy", submitted.privacy, file.privacy),
                ("weighting", submitted.weighting, file.weighting),
                ("staleness", submitted.staleness, file.staleness),
            )
            if ours != theirs
        ]
        if (submitted.threshold or 0) < (file.threshold or 0):
            found.append(f"threshold = {submitted.threshold}, but the file has {file.threshold}")
    advice = "devices that have this file will refuse the task. Instead of using --set, change the "
    return [f"{difference}: {advice}file and give it to the devices" for difference in found]
