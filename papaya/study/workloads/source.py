"""Data of a user's own: clients with examples, which the devices of a population hold.

A population has up to ten billion devices, a source as many clients as there are data for: device
i holds the data of client i modulo their number. Each example lies on one side of the split by the
rule of the devices' example store (`papaya/device/example_store.py`), with the shares that a
collection has by default: what a simulated device trains on, a real one would.

The validation side is held out for judging. Nothing here reads the test side.

A source is made of texts (one file is one client; the task file's `load_examples(text)` makes the
examples, as on a device, otherwise each line that is not empty is one), or of LEAF's JSON format
(https://github.com/TalwalkarLab/leaf):

    {"users": ["u1", …], "num_samples": [2, …],
     "user_data": {"u1": {"x": […, …], "y": […, …]}, …}}

Nothing is downloaded. Refused, with the file and the user: JSON of another shape, a user twice or
without data, counts that differ from the data, files above the limits.
"""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import structs

from papaya.config.checks import require
from papaya.device.example_store import MAX_EXAMPLE_BYTES, Split, split_of
from papaya.device.executor import LOADER
from papaya.device.texts import LIBRARY, library_texts, lines, texts_in, unreadable
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError
from papaya.learning.task import LoadedTask
from papaya.sim.draws import Ints
from papaya.sim.population import DEFAULT, Population, PopulationConfig

TextLoader: TypeAlias = Callable[[str], list[bytes]]

_SHARES: Final = UsePolicy()
_MAX_CLIENTS: Final = 1_000_000
_MAX_BYTES: Final = 4 << 30
_REFERENCE_VISITS: Final = 1 << 16
_MAX_TEXT_BYTES: Final = 64 << 20
_MAX_TEXTS: Final = 1_000_000
_MAX_FILE_BYTES: Final = 2 << 30
_MAX_FILES: Final = 10_000
_SHAPE: Final = '{"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}'


class Source(Protocol):
    """Clients, counted from 0, each with at least one example to train on."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def digest(self) -> str:
        """Of all examples and whose they are: other data, another digest."""

    @property
    def volumes(self) -> Ints:
        """How many examples each client has to train on. As long as there are clients."""

    def training(self, client: int) -> list[bytes]:
        """What this client trains on, as the task's `batch` takes it, in the source's order."""

    def held_out(self, client: int) -> list[bytes]:
        """What a model is judged by on this client; may be empty."""


class Memory:
    """A source whose examples are given, a list for each client, and stay in memory.

    Clients with nothing to train on are left out; `left_out` says how many.
    """

    def __init__(self, name: str, clients: Iterable[Sequence[bytes]]) -> None:
        self.name = name
        self.left_out = 0
        self._training: list[list[bytes]] = []
        self._held_out: list[list[bytes]] = []
        hasher, size = hashlib.sha256(), 0
        for examples in clients:
            size += _checked(name, examples)
            _within(name, len(self._training) + 1, size)
            sides: dict[Split, list[bytes]] = {"train": [], "validation": [], "test": []}
            for example in examples:
                sides[split_of(example, _SHARES)].append(example)
            if not sides["train"]:
                self.left_out += 1
                continue
            self._training.append(sides["train"])
            self._held_out.append(sides["validation"])
            hasher.update(_fingerprint(examples))
        if not self._training:
            raise OperatorError(f"{name} contains no examples", hint="use data that is not empty")
        self.digest = hasher.hexdigest()[:32]
        self.volumes: Ints = np.array([len(examples) for examples in self._training], np.int64)

    def training(self, client: int) -> list[bytes]:
        return self._training[client]

    def held_out(self, client: int) -> list[bytes]:
        return self._held_out[client]


def population_of(
    source: Source,
    max_examples: int,
    config: PopulationConfig = DEFAULT,
    seconds_per_example: float | None = None,
) -> PopulationConfig:
    """A population whose devices have as many examples as the source's clients, as far as a task
    trains on them.

    How long an example takes on a phone, no data says: unless given, execution takes as long in
    the mean as in `config`.
    """
    volumes = np.minimum(source.volumes, max_examples)
    if seconds_per_example is None:
        own = structs.replace(config, volumes=tuple(volumes.tolist()))
        ratio = _mean_execution_s(config) / _mean_execution_s(own)
        seconds_per_example = float(f"{config.execution_per_example_s * ratio:.3g}")
    return structs.replace(
        config, volumes=tuple(volumes.tolist()), execution_per_example_s=seconds_per_example
    )


def _mean_execution_s(config: PopulationConfig) -> float:
    visits = Population(config, seed=0).visitors(np.arange(_REFERENCE_VISITS))
    return float(visits.execution_s.mean())


def _checked(name: str, examples: Sequence[bytes]) -> int:
    """Their size in bytes."""
    largest = max(map(len, examples), default=0)
    remedy = "cut it into smaller examples: devices take no larger ones"
    problem = f"is above the limit of {MAX_EXAMPLE_BYTES}"
    require(largest <= MAX_EXAMPLE_BYTES, f"an example of {name}", largest, problem, remedy)
    return sum(map(len, examples))


def _within(name: str, clients: int, size: int) -> None:
    if clients > _MAX_CLIENTS or size > _MAX_BYTES:
        raise OperatorError(
            f"{name} has more than {_MAX_CLIENTS:,} clients or {_MAX_BYTES >> 30} GiB of examples",
            hint="take a sample of its clients",
        )


def _fingerprint(examples: Sequence[bytes]) -> bytes:
    hasher = hashlib.sha256()
    for example in examples:
        hasher.update(len(example).to_bytes(8, "big"))
        hasher.update(example)
    return hasher.digest()


# --- texts --------------------------------------------------------------------------------------


def library_source(load: TextLoader, library: Path = LIBRARY) -> Memory:
    """The texts of Python's standard library."""
    return text_source("the standard library", library_texts(library), load)


def folder_source(folder: Path, load: TextLoader) -> Memory:
    """Every text of a folder and its folders, in order; no hidden ones."""
    if not folder.is_dir():
        raise OperatorError(f"{folder} is not a folder", hint="use a folder with text files")
    return text_source(f"texts in {folder}", texts_in(folder), load)


def text_source(name: str, texts: list[Path], load: TextLoader) -> Memory:
    if not texts:
        raise OperatorError(f"there are no {name}", hint="use a folder with text files")
    if len(texts) > _MAX_TEXTS:
        raise OperatorError(
            f"{name}: {len(texts):,} files, above the limit of {_MAX_TEXTS:,}",
            hint="use a folder with fewer files",
        )
    return Memory(name, (_loaded(path, load) for path in texts))


def loader_of(loaded: LoadedTask) -> TextLoader:
    """How this task makes examples of a text."""
    loader: TextLoader = runpy.run_path(str(loaded.path)).get(LOADER, lines)
    return loader


def _loaded(path: Path, load: TextLoader) -> list[bytes]:
    try:
        with path.open("rb") as opened:
            raw = opened.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(raw) > _MAX_TEXT_BYTES:
        raise OperatorError(
            f"{path} has more than {_MAX_TEXT_BYTES >> 20} MiB", hint="split it into several files"
        )
    try:
        examples = list(load(raw.decode("utf-8", "replace")))
    except Exception as error:
        raise OperatorError(
            f"{LOADER} fails on {path}: {type(error).__name__}: {error}",
            hint="fix it in the task file, or leave this text out",
        ) from error
    for example in examples:
        if not isinstance(example, bytes):
            raise OperatorError(
                f"{LOADER} returned a {type(example).__name__} for {path}, expected bytes",
                hint="return a list of bytes",
            )
    return examples


# --- LEAF ---------------------------------------------------------------------------------------


class _Data(msgspec.Struct, frozen=True):
    x: list[msgspec.Raw]
    y: list[msgspec.Raw]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _Data]
    hierarchies: msgspec.Raw = msgspec.Raw(b"[]")


def leaf_source(path: Path) -> Memory:
    """The users of a file, or of all `*.json` in a folder, as clients in their order.

    An example is the bytes `{"x":…,"y":…}` with both values as they stand in the file, so a task's
    `batch` begins with `[json.loads(example) for example in examples]`. LEAF's folders `train` and
    `test` are not used as a split: name one of them.
    """
    return Memory(f"LEAF {path}", _clients(_files_of(path)))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.glob("*.json") if not file.name.startswith("."))
    if not found:
        inner = sorted(folder.parent for folder in path.glob("*/*.json"))
        hint = f"leaf:{inner[0]}" if inner else "use a folder with LEAF's files"
        raise OperatorError(f"there is no *.json in {path}", hint=hint)
    if len(found) > _MAX_FILES:
        raise OperatorError(
            f"{path} has {len(found):,} files, above the limit of {_MAX_FILES:,}",
            hint="join them: a file can contain many users",
        )
    return found


def _clients(files: list[Path]) -> Iterator[list[bytes]]:
    where: dict[str, Path] = {}
    for path in files:
        content = _decoded(path)
        if len(content.num_samples) != len(content.users):
            raise _malformed(
                path, f"{len(content.users)} users and {len(content.num_samples)} num_samples"
            )
        if strangers := content.user_data.keys() - set(content.users):
            raise _malformed(path, f"user_data of {min(strangers)!r}, who is not in users")
        for user, count in zip(content.users, content.num_samples, strict=True):
            if user in where:
                raise _malformed(path, f"user {user!r} is in {where[user]} already")
            where[user] = path
            yield _examples(path, content, user, count)


def _examples(path: Path, content: _File, user: str, count: int) -> list[bytes]:
    data = content.user_data.get(user)
    if data is None:
        raise _malformed(path, f"user {user!r} has no user_data")
    if not len(data.x) == len(data.y) == count:
        raise _malformed(
            path,
            f"user {user!r} has {len(data.x)} x, {len(data.y)} y and num_samples {count}",
        )
    pairs = zip(data.x, data.y, strict=True)
    return [b'{"x":%b,"y":%b}' % (bytes(x), bytes(y)) for x, y in pairs]


def _decoded(path: Path) -> _File:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise OperatorError(
                f"{path} has more than {_MAX_FILE_BYTES >> 30} GiB",
                hint="take a sample: LEAF's preprocess.sh has --sf",
            )
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}", hint="check its name and its permissions"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _malformed(path, str(error)) from error


def _malformed(path: Path, problem: str) -> OperatorError:
    return OperatorError(f"invalid LEAF file {path}: {problem}", hint=f"write {_SHAPE}")
