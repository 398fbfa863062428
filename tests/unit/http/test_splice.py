"""Bytes that pass from socket to socket inside the kernel: all of them, in order, nobody else's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import numpy as np
import pytest

from papaya.http.splice import MAX_AHEAD_BYTES, Pipe, TargetBroken, open_pipe

BODY = np.random.default_rng(2).bytes(4 << 20)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    found = open_pipe()
    assert found is not None
    with closing(found):
        yield found


def a_connection() -> tuple[socket.socket, socket.socket]:
    """Both ends, which do not wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


def taken(end: socket.socket) -> bytes:
    data = b""
    with suppress(BlockingIOError):
        while piece := end.recv(1 << 20):
            data += piece
    return data


def test_a_body_passes_whole_while_the_target_has_room_and_none(pipe: Pipe) -> None:
    sender, source = a_connection()
    target, receiver = a_connection()
    with sender, source, target, receiver:
        target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sent, came, out, was_full = 0, 0, b"", False
        left_over = b"the head"
        while len(out) < len(BODY) + 8:
            if sent < len(BODY):
                with suppress(BlockingIOError):
                    sent += sender.send(BODY[sent:])
            if not left_over or came == 0:
                ahead, left_over = left_over, b""
                count, left_over = pipe.move(source.fileno(), target.fileno(), len(BODY), ahead)
                came += count
                was_full = was_full or bool(left_over)
                if count and not left_over:
                    continue  # until there is no room: only then is anything read
            out += taken(receiver)
            if left_over:
                left_over = left_over[target.send(left_over) :]
        assert out == b"the head" + BODY
        assert (came, was_full) == (len(BODY), True)


def test_no_more_is_taken_than_was_asked_for(pipe: Pipe) -> None:
    sender, source = a_connection()
    target, receiver = a_connection()
    with sender, source, target, receiver:
        assert pipe.move(source.fileno(), target.fileno(), 5) == (0, b"")
        sender.sendall(b"body and the next request")
        assert pipe.move(source.fileno(), target.fileno(), 4, b"head ") == (4, b"")
        assert taken(receiver) == b"head body"
        assert taken(source) == b" and the next request"


def test_a_target_that_broke_leaves_nothing_for_the_next(pipe: Pipe) -> None:
    sender, source = a_connection()
    broken, gone = a_connection()
    target, receiver = a_connection()
    with sender, source, target, receiver:
        sender.sendall(b"secret")
        gone.close()
        broken.close()
        with pytest.raises(TargetBroken) as raised:
            pipe.move(source.fileno(), broken.detach(), 9, bytes(MAX_AHEAD_BYTES))
        assert raised.value.came == 6
        sender.sendall(b"mine")
        assert pipe.move(source.fileno(), target.fileno(), 4) == (4, b"")
        assert taken(receiver) == b"mine"


def test_a_source_that_ended_gives_nothing(pipe: Pipe) -> None:
    sender, source = a_connection()
    target, receiver = a_connection()
    with source, target, receiver:
        sender.close()
        assert pipe.move(source.fileno(), target.fileno(), 9, b"head") == (0, b"")
        assert taken(receiver) == b"head"


def test_a_closed_pipe_has_no_files() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pipe = open_pipe()
    assert pipe is not None
    assert pipe.size >= 2 * MAX_AHEAD_BYTES
    pipe.close()
    assert len(os.listdir("/proc/self/fd")) == before
