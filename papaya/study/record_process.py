"""Records a plan and sends its trace as it grows: the other end of followed_trace.py.

Reads a `RecordingPlan` as JSON from standard input and writes frames to standard output. It ends
with the process that reads them: writing to a closed pipe fails.
"""

from __future__ import annotations

import os
import sys

import msgspec

from papaya.study.followed_trace import TraceEnd, TracePart, write_frame
from papaya.study.run import RecordingPlan, record_plan
from papaya.study.trace import Recorder


def main() -> None:
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is not a frame
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=RecordingPlan)
    versions = members = 0

    def send(recorder: Recorder) -> None:
        nonlocal versions, members
        found = recorder.since(versions, members)
        versions, members = recorder.version, recorder.counted
        write_frame(frames, TracePart(*found, recorder.engine.now))

    try:
        _, report = record_plan(plan, send)
        write_frame(frames, TraceEnd(msgspec.msgpack.encode(report)))
    except BrokenPipeError:
        os._exit(1)  # nobody needs the recording any more


if __name__ == "__main__":
    main()
