"""Bytes and time across the boundary of the TSA: asynchronous secure aggregation or naive.

Paper, figure "Data transfer time versus aggregation goal": naive aggregation moves every update of
K clients into the trusted environment, O(K m) bytes; asynchronous secure aggregation moves a sealed
seed of each client in and one sum of masks out, O(K + m).

`bytes_into_tee` and `bytes_out_of_tee` count, from the wire format itself. `measure_transfer` moves
those bytes between two processes, message by message, each answered before the next is sent, and
measures the time. Neither side computes anything. A process is not an enclave: real boundaries are
slower, for both designs.

The plot shows the bytes on the left and the time to move them in and the sum out on the right.
Bytes are counted; a time that was not measured is drawn hollow, in proportion to its bytes, from
the largest measured K of the same design.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.parameters import EXTRA_WORDS, HASH_BYTES
from papaya.secagg.words import RING_32
from papaya.sim.plots import COLORS, prepare, save
from papaya.study.experiments.result import Finding, Result
from papaya.study.experiments.runs import Scale
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan
from papaya.tsa import endpoint, wire

KEY = "tee-transfer"
MEASURED = 100
Design: TypeAlias = Literal["asynchronous", "naive"]
DESIGNS: Final[tuple[Design, ...]] = ("asynchronous", "naive")
MODEL_BYTES: Final = 20_000_000
GOALS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

SEED_MESSAGE_BYTES: Final = len(wire.accept_request(0, 0, bytes(SEALED_BYTES)))
_NO_HASH: Final = bytes(HASH_BYTES)
NAME_BYTES: Final = len(wire.release_request(_NO_HASH, 0, (0,))) - len(
    wire.release_request(_NO_HASH, 0, ())
)
BYTES_PER_CLIENT: Final = SEED_MESSAGE_BYTES + NAME_BYTES  # its seed, and its place in the list
_ANSWER_BYTES: Final = len(wire.frame(wire.DONE))
_FRAME: Final = struct.Struct(">QQ")  # bytes that come, and bytes that are wanted back
_TIMEOUT_S: Final = 60.0
_ENOUGH_S: Final = 5.0  # of both designs, for one K
_PIECE_BYTES: Final = 1 << 20
_LABELS: dict[Design, str] = {
    "asynchronous": "a seed per client, one sum of masks: O(K + m)",
    "naive": "naive: every update crosses: O(K m)",
}
_X_LABEL = "aggregation goal K"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return []


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    moved = measure_transfer(model_bytes=MODEL_BYTES, naive_up_to=MEASURED)
    seconds = {(one.design, one.k): one.seconds for one in moved if one.seconds is not None}
    size = {(one.design, one.k): one.bytes_in + one.bytes_out for one in moved}
    ours, naive = DESIGNS
    last = GOALS[-1]
    fewer = size[naive, last] / size[ours, last]
    faster = seconds[naive, MEASURED] / seconds[ours, MEASURED]
    per_client = bytes_into_tee(2, MODEL_BYTES, ours) - bytes_into_tee(1, MODEL_BYTES, ours)
    return Result(
        key=KEY,
        title="What crosses into the TSA",
        paper="Figure 6: data transfer time by K, naive TEE aggregation or asynchronous SecAgg",
        findings=(
            Finding(name="bytes into the TSA per client", paper="constant", values=(per_client,)),
            Finding(name=f"naive ÷ ours, bytes at K = {last}", values=(fewer,)),
            Finding(name=f"naive ÷ ours, time at K = {MEASURED}", values=(faster,)),
        ),
        plots=(draw_transfer(moved, lab.folder / f"{KEY}.png").name,),
        notes=(
            (
                "The model has 20 MB. Times are for moving bytes between two processes on this "
                f"machine; the naive design is timed only up to K = {MEASURED}. Crossing the "
                "boundary of an enclave is slower for both designs."
            ),
        ),
    )


# -- bytes and time ----------------------------------------------------------------------------


def bytes_into_tee(k: int, model_bytes: int, design: Design) -> int:
    """Of K clients, for one sum."""
    return sum(into for into, _ in _messages(k, model_bytes, design))


def bytes_out_of_tee(k: int, model_bytes: int, design: Design) -> int:
    """One vector, and an answer to each client's message."""
    return sum(out for _, out in _messages(k, model_bytes, design))


def _messages(k: int, model_bytes: int, design: Design) -> list[tuple[int, int]]:
    """Bytes of each message and of its answer: one per client, then the question for the sum."""
    listed = len(wire.release_request(_NO_HASH, 0, range(k)))
    if design == "naive":
        per_client = len(wire.frame_head(wire.DONE, model_bytes)) + model_bytes
        answer = len(wire.frame_head(wire.DONE, model_bytes)) + model_bytes
    else:
        per_client = SEED_MESSAGE_BYTES
        answer = len(wire.frame_head(wire.DONE, 0)) + model_bytes + EXTRA_WORDS * RING_32.word_bytes
    return [*[(per_client, _ANSWER_BYTES)] * k, (listed, answer)]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One sum of K clients; `seconds` is None where nothing was moved, only counted.

    `seconds` is the median of `turns`.
    """

    design: Design
    k: int
    bytes_in: int
    bytes_out: int
    seconds: float | None = None
    turns: int = 0


def measure_transfer(
    goals: Sequence[int] = GOALS,
    model_bytes: int = MODEL_BYTES,
    *,
    naive_up_to: int = 100,
    turns: int = 3,
) -> list[Transfer]:
    """Both designs for every K, naive beyond `naive_up_to` only counted. Medians of `turns`.

    For one K the designs take turns, so load on the machine affects both alike. There are fewer
    turns than asked for where a turn takes long.
    """
    found = []
    with _boundary() as stream:
        for k in goals:
            messages = {design: _messages(k, model_bytes, design) for design in DESIGNS}
            moved = [design for design in DESIGNS if design != "naive" or k <= naive_up_to]
            moves = [partial(_moved_s, stream, messages[design]) for design in moved]
            times = dict(zip(moved, in_turns(moves, turns), strict=True))
            for design in DESIGNS:
                into, out = (sum(sizes) for sizes in zip(*messages[design], strict=True))
                taken = times.get(design, [])
                seconds = median(taken) if taken else None
                found.append(Transfer(design, k, into, out, seconds, len(taken)))
    return sorted(found, key=lambda transfer: DESIGNS.index(transfer.design))


def in_turns(moves: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """What each move took, every time; once at least, not again when all took `_ENOUGH_S`."""
    times: list[list[float]] = [[] for _ in moves]
    for _ in range(turns):
        for move, taken in zip(moves, times, strict=True):
            taken.append(move())
        if sum(map(sum, times)) >= _ENOUGH_S:
            break
    return times


def _moved_s(stream: socket.socket, messages: Sequence[tuple[int, int]]) -> float:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    start_s = time.perf_counter()
    for size, answer in messages:
        stream.sendall(_FRAME.pack(size, answer))
        _send(stream, size, buffer)
        _receive(stream, answer, buffer)
    return time.perf_counter() - start_s


def _send(stream: socket.socket, size: int, buffer: memoryview) -> None:
    while size:
        stream.sendall(buffer[: min(size, len(buffer))])
        size -= min(size, len(buffer))


def _receive(stream: socket.socket, size: int, buffer: memoryview) -> bool:
    """False when the other side is gone before the first byte."""
    left = size
    while left:
        got = stream.recv_into(buffer[: min(left, len(buffer))])
        if got == 0:
            if left == size:
                return False
            raise ConnectionResetError("the other side of the boundary is gone")
        left -= got
    return True


def answer_messages(address: str) -> None:
    """The far side: takes what comes, answers with as many bytes as are wanted."""
    with endpoint.connect(address, _TIMEOUT_S) as stream:
        head, buffer = memoryview(bytearray(_FRAME.size)), memoryview(bytearray(_PIECE_BYTES))
        while _receive(stream, len(head), head):
            size, answer = _FRAME.unpack(head)
            _receive(stream, size, buffer)
            _send(stream, answer, buffer)


@contextmanager
def _boundary() -> Iterator[socket.socket]:
    """A connection to another process, which ends with it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        address = f"unix:{folder}/boundary"
        with endpoint.listen(address) as listener:
            listener.settimeout(_TIMEOUT_S)
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=answer_messages, args=(address,))
            process.start()
            try:
                stream, _ = listener.accept()
                with stream:
                    endpoint.tune(stream)
                    yield stream
            finally:
                process.terminate()
                process.join()


# -- the plot ----------------------------------------------------------------------------------


def draw_transfer(transfers: Sequence[Transfer], path: Path) -> Path:
    """Write the figure; the file name chooses the format."""
    return save(lambda: _figure(transfers), path)


def _figure(transfers: Sequence[Transfer]) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    out = max(found.bytes_out for found in transfers) / 1e6
    prepare(left, f"Into the TSA, for a {out:.0f} MB model", _X_LABEL, "MB")
    prepare(right, "Time to transfer, in and out", _X_LABEL, "milliseconds")
    for design, color in zip(DESIGNS, COLORS, strict=False):
        found = [transfer for transfer in transfers if transfer.design == design]
        goals = [transfer.k for transfer in found]
        sizes = [transfer.bytes_in / 1e6 for transfer in found]
        left.plot(goals, sizes, "o-", color=color, ms=4, lw=1.5, label=_LABELS[design])
        _draw_times(right, found, color)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
    left.legend(frameon=False, fontsize=8.5)
    return figure


def _draw_times(axes: Axes, transfers: Sequence[Transfer], color: str) -> None:
    measured = [t for t in transfers if t.seconds is not None]
    times = [1e3 * seconds_of(t, measured) for t in transfers]
    axes.plot([t.k for t in transfers], times, "-", color=color, lw=1.5)
    for transfer, ms in zip(transfers, times, strict=True):
        face = color if transfer.seconds is not None else "white"
        axes.plot(transfer.k, ms, "o", color=color, mfc=face, ms=4)


def seconds_of(transfer: Transfer, measured: Sequence[Transfer]) -> float:
    """As measured, or in proportion to the bytes of the largest that was."""
    if transfer.seconds is not None:
        return transfer.seconds
    largest = max(measured, key=lambda found: found.k)
    assert largest.seconds is not None
    share = (transfer.bytes_in + transfer.bytes_out) / (largest.bytes_in + largest.bytes_out)
    return largest.seconds * share
