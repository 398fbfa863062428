"""Makes the parts of the devices from the options of `papaya client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple, Self

from papaya.cli.client.client import ClientOptions
from papaya.cli.output import note, plural
from papaya.clock import Clock
from papaya.config import DeviceConfig
from papaya.credentials.token_files import read as read_token
from papaya.device.bundles import BundleStore
from papaya.device.device import Device
from papaya.device.events import Notify
from papaya.device.example_store import ExampleStore
from papaya.device.executor import LOADER, EngineName
from papaya.device.limits import CheckInPacing, DeviceLimits
from papaya.device.owners import parse_owners
from papaya.device.process import DeviceProcess, memory_mb
from papaya.device.texts import lines, texts_in, unreadable
from papaya.device.training import ExecutorTrainer, ProtocolTrainer, Trainer, sandboxed
from papaya.device.trust import Trust, read_policy
from papaya.device.use_policy import UsePolicy, parse_policies
from papaya.errors import OperatorError
from papaya.learning.definition import module_hash
from papaya.learning.executorch.program_file import is_program


def listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def device_stores(path: Path, devices: int) -> list[Path]:
    """The file itself for one device; files in the folder for several."""
    try:
        if devices == 1 and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            return [path]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "use a folder that can be written: --store DIR"
        raise OperatorError(
            f"cannot create the store {path}: {error.strerror}", hint=hint
        ) from error
    return [path / f"device-{number}.db" for number in range(1, devices + 1)]


def device_tokens(files: Sequence[Path], devices: int) -> list[str | None]:
    if not files:
        return [None] * devices
    if len(files) not in (1, devices):
        raise OperatorError(
            f"{len(files)} token files for {devices} devices",
            hint="give --token-file once for all devices, or once per device",
        )
    tokens: list[str | None] = [read_token(path).reveal() for path in files]
    return tokens * (devices // len(tokens))


def device_process(options: ClientOptions, clock: Clock, notify: Notify) -> DeviceProcess:
    """What all devices share."""
    # Devices that only wait need no core.
    parallel = options.max_parallel if options.protocol_only is None else options.devices
    return DeviceProcess(
        now=clock.now,
        limits=DeviceLimits(max_training_s=options.max_training),
        pacing=CheckInPacing(pause_s=options.pause),
        assume=listed(options.assume),
        max_parallel=parallel,
        blobs_url=options.blobs_url,
        blobs_hosts=options.blobs_host or (),
        upload_hosts=options.upload_host or (),
        certificates=options.ca,
        proxy=options.proxy,
        trust=trust_in(options.trust, options.store, clock.now, options.ca),
        notify=notify,
    )


class DeviceFiles(NamedTuple):
    """The store and the token of each device, and the policies of all."""

    stores: list[Path]
    tokens: list[str | None]
    policies: dict[str, UsePolicy]

    @classmethod
    def of(cls, options: ClientOptions) -> Self:
        return cls(
            device_stores(options.store, options.devices),
            device_tokens(options.token_file, options.devices),
            policies_in(options.policies),
        )


def opened_devices(
    options: ClientOptions,
    files: DeviceFiles,
    process: DeviceProcess,
    trainer: Trainer,
    bundles: BundleStore | None,
    notify: Notify,
) -> Iterator[Device]:
    """Opens the files of a device when it is asked for; the caller closes it."""
    for number, (store, token) in enumerate(zip(files.stores, files.tokens, strict=True), 1):
        yield Device(
            process,
            selectors=listed(options.server),
            store=store,
            trainer=trainer,
            policies=files.policies,
            token=token,
            name=f"device-{number}",
            memory_mb=memory_mb(),
            labels=listed(options.labels),
            config=DeviceConfig(participation_floor_s=options.participation_floor),
            bundles=bundles,
            notify=notify,
        )


@asynccontextmanager
async def trainer_for(
    options: ClientOptions, clock: Clock
) -> AsyncIterator[tuple[Trainer, list[str]]]:
    """The trainer, and the names of the tasks that it can train; empty means any task."""
    files, mean_s = options.task, options.protocol_only
    if missing := [path for path in files if not path.is_file()]:
        raise OperatorError(f"there is no task file {missing[0]}", hint="check --task FILE")
    if mean_s is not None:
        from papaya.sim.protocol_updates import protocol_update

        rng, modules = Random(), tuple(module_hash(path.read_bytes()) for path in files)
        seconds = partial(rng.expovariate, 1 / mean_s)
        yield ProtocolTrainer(protocol_update, seconds, modules=modules), []
        return
    if not files and options.owners is None:
        raise OperatorError(
            "no task file and no owners were given",
            hint="papaya client --task my_task.py, or --owners owners.toml",
        )
    _check_kinds(files, options.engine)
    async with sandboxed(
        files,
        clock.now,
        engine=options.engine,
        aliases=dict(options.alias),
        memory_mb=options.memory,
        max_parallel=options.max_parallel,
    ) as trainer:
        yield trainer, list(trainer.tasks)


def bundles_in(owners: Path | None, folder: Path) -> BundleStore | None:
    if owners is None:
        return None
    try:
        policies = parse_owners(owners.read_bytes(), str(owners))
    except OSError as error:
        raise OperatorError(
            f"cannot read the owners file {owners}: {error.strerror}", hint="check --owners FILE"
        ) from error
    return BundleStore(folder, policies)


def _check_kinds(files: Sequence[Path], engine: EngineName) -> None:
    for path in files:
        if is_program(path) and engine != "executorch":
            hint = f"papaya client --engine executorch --task {path}"
            raise OperatorError(f"{path} is a program, which needs another engine", hint=hint)
        if not is_program(path) and engine == "executorch":
            hint = f"papaya task compile {path}, or --engine torch"
            raise OperatorError(f"{path} is not a program", hint=hint)


def policies_in(path: Path | None) -> dict[str, UsePolicy]:
    if path is None:
        return {}
    try:
        return parse_policies(path.read_bytes(), str(path))
    except OSError as error:
        raise OperatorError(
            f"cannot read the policies {path}: {error.strerror}", hint="check --policies FILE"
        ) from error


async def import_examples(
    imports: Sequence[tuple[str, Path]],
    devices: Sequence[Device],
    task_files: Sequence[Path],
    trainer: Trainer,
    tasks: Sequence[str],
    bundles: BundleStore | None,
    now: float,
) -> None:
    """Deal the files out to the devices: file 1 to device 1, and so on, starting over at the end.

    A device keeps one copy of an example, so the command can be repeated. A collection without a
    policy gets one that allows the tasks of this command.
    """
    for collection, path in imports:
        for device in devices:
            if collection not in device.store.collections:
                device.store.declare({collection: UsePolicy(tasks=tuple(tasks))})
        files = files_in(path)
        found = await examples_of(files, task_files, trainer)
        if isinstance(trainer, ExecutorTrainer):
            await _check_fit(collection, files, found, trainer)
            _warn_if_unused(collection, devices[0].store, trainer, bundles)
        stores = [device.store for device in devices]
        added = await asyncio.to_thread(_deal_out, found, stores, collection, now)
        what = f"{plural(len(files), 'file')} for collection {collection}"
        is_old = any(found) and not added
        note(
            f"{what}: already imported"
            if is_old
            else (
                f"imported {added:,} new examples from {plural(len(files), 'file')} into "
                f"collection {collection}"
            )
        )


async def _check_fit(
    collection: str,
    files: Sequence[Path],
    found: Sequence[Sequence[bytes]],
    trainer: ExecutorTrainer,
) -> None:
    """Refuse an import with an example that a task file of this device cannot use."""
    unfit = await trainer.first_unfit(collection, list(chain.from_iterable(found)))
    if unfit is None:
        return
    task, index = unfit[0], unfit[1].index
    for path, examples in zip(files, found, strict=True):
        if index < len(examples):
            raise OperatorError(
                f"{_place(path, examples, index)}: task {task} cannot use this example: "
                f"{unfit[1].problem}",
                hint=f"nothing was imported into {collection}; correct or remove the example",
            )
        index -= len(examples)


def _place(path: Path, examples: Sequence[bytes], index: int) -> str:
    """FILE:LINE, or the number of the example if the task file made it from the text."""
    text = _read(path)
    numbers = [number for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    is_line = lines(text) == list(examples)
    return f"{path}:{numbers[index]}" if is_line else f"{path}, example {index + 1}"


def _warn_if_unused(
    collection: str, store: ExampleStore, trainer: ExecutorTrainer, bundles: BundleStore | None
) -> None:
    policy = store.collections[collection]
    tasks = [task for task, used in trainer.collections.items() if used == collection]
    if any(map(policy.allows, tasks)) or (bundles is not None and bundles.may_use(collection)):
        return
    uses = "; ".join(f"{task} uses {used}" for task, used in trainer.collections.items())
    reason = f"its policy allows none of {', '.join(tasks)}" if tasks else uses
    note(f"warning: no task of this device may use collection {collection}: {reason}")


def _deal_out(
    found: Sequence[Sequence[bytes]], stores: Sequence[ExampleStore], collection: str, now: float
) -> int:
    return sum(
        stores[number % len(stores)].add_new(collection, examples, now)
        for number, examples in enumerate(found)
    )


def trust_in(
    path: Path | None, store: Path, now: Callable[[], float], certificates: Path | None = None
) -> Trust | None:
    """The policy about TSAs. The last checkpoint of the log is saved in a file beside the store."""
    if path is None:
        return None
    policy = read_policy(path)
    if policy.allow_insecure_software:
        note("INSECURE: software evidence is accepted, which proves nothing")
    checkpoint = store.with_name(f"{store.name}.log-checkpoint")
    return Trust(policy, checkpoint, now, certificates=certificates)


async def examples_of(
    files: Sequence[Path], task_files: Sequence[Path], trainer: Trainer
) -> list[list[bytes]]:
    """The examples of each file: its lines, or what the task file makes of it.

    If a task file has a function `load_examples(text) -> list of bytes`, it is called in a child
    process, so that this process does not import the training engine.
    """
    texts = [_read(path) for path in files]
    sources = [path for path in task_files if not is_program(path)]
    loaders = [path for path in sources if f"def {LOADER}(" in _read(path)]
    if loaders and isinstance(trainer, ExecutorTrainer):
        return await trainer.load_examples(loaders[0], texts)
    return [lines(text) for text in texts]


def files_in(path: Path) -> list[Path]:
    """The file itself, or all text files in a folder and its subfolders, except hidden ones."""
    if not path.is_dir():
        return [path]
    return texts_in(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise unreadable(path, error) from error
