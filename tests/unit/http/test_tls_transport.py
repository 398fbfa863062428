"""The transport that lets OpenSSL read from and write to the socket."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from papaya.http import tls_transport
from papaya.http.routes import Buffered
from papaya.http.tls_transport import TlsTransport, start_tls
from tests.unit.http.loopback import LOOPS, a_client, a_request, a_server, run, tls_contexts

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
RECORD = 16 << 10


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """The server's and the client's."""
    return tls_contexts(tmp_path_factory.mktemp("tls"))


class Recorder(asyncio.BufferedProtocol):
    """Keeps what arrives, in pieces of at most `room`, and pauses after each if told to."""

    transport: TlsTransport

    def __init__(self, room: int = 1 << 20, *, pauses: bool = False) -> None:
        self._room = memoryview(bytearray(room))
        self._pauses = pauses
        self.got = b""
        self.is_full = False
        self.news = asyncio.Event()
        self.ends: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsTransport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.got += self._room[:nbytes]
        if self._pauses:
            self.transport.pause_reading()
        self.news.set()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.news.clear()
            await self.news.wait()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]


async def a_pair(
    contexts: Contexts,
    recorder: Recorder,
    connect: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> ssl.SSLSocket:
    """The peer's end, which blocks: use it in a thread."""
    ours, theirs = connect()
    make = lambda: contexts[1].wrap_socket(theirs, server_hostname="127.0.0.1")  # noqa: E731
    peer, _ = await asyncio.gather(
        asyncio.to_thread(make), start_tls(ours, contexts[0], lambda: recorder, timeout_s=60)
    )
    return peer


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_that_openssl_holds_are_delivered_without_new_ones(
    loop: str, contexts: Contexts
) -> None:
    """One record is larger than the room: the kernel has nothing more to report."""

    async def main() -> None:
        recorder = Recorder(room=1000, pauses=True)
        peer = await a_pair(contexts, recorder)
        sent = bytes(range(250)) * 60
        await asyncio.to_thread(peer.sendall, sent)
        pieces = 0
        while len(recorder.got) < len(sent):
            pieces += 1
            await recorder.until(lambda: len(recorder.got) == 1000 * pieces)  # noqa: B023
            recorder.transport.resume_reading()
        assert recorder.got == sent
        recorder.transport.abort()
        peer.close()

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_paused_connection_reads_nothing(loop: str, contexts: Contexts) -> None:
    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder)
        recorder.transport.pause_reading()
        await asyncio.to_thread(peer.sendall, b"later")
        for _ in range(20):
            await asyncio.sleep(0)
        assert recorder.got == b""
        recorder.transport.resume_reading()
        await recorder.until(lambda: recorder.got == b"later")
        recorder.transport.abort()
        peer.close()

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_the_socket_does_not_take_is_sent_later_and_before_the_end(
    loop: str, contexts: Contexts
) -> None:
    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder)
        recorder.transport.set_write_buffer_limits(high=0, low=0)
        data = bytearray(b"a" * (4 << 20))
        recorder.transport.write(data)
        assert recorder.is_full
        assert recorder.transport.get_write_buffer_size() > 0
        data[:] = b"b" * len(data)  # the caller may reuse it
        recorder.transport.close()
        received = await asyncio.to_thread(_everything, peer)
        assert received == b"a" * (4 << 20)
        await recorder.until(lambda: bool(recorder.ends))
        assert recorder.ends == [None]
        assert not recorder.is_full

    run(main(), loop)


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="only Linux joins records to packets")
@pytest.mark.parametrize("size", [2 * RECORD + 1, 16 << 20])
def test_no_packet_is_held_back_after_a_write(size: int, contexts: Contexts) -> None:
    """Records are joined to packets while they are written, whether the socket takes all or not."""

    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder, tcp_pair)
        recorder.transport.write(b"a" * size)
        assert bool(recorder.transport.get_write_buffer_size()) == (size > 3 * RECORD)
        assert not _holds_packets_back(recorder.transport)
        recorder.transport.close()
        assert len(await asyncio.to_thread(_everything, peer)) == size

    run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="only Linux joins records to packets")
def test_no_packet_is_held_back_after_a_mistaken_write(contexts: Contexts) -> None:
    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder, tcp_pair)
        with pytest.raises(BufferError):
            recorder.transport.write(memoryview(bytes(4 * RECORD))[::2])
        assert not _holds_packets_back(recorder.transport)
        recorder.transport.abort()
        peer.close()

    run(main())


def _holds_packets_back(transport: TlsTransport) -> bool:
    with socket.socket(fileno=os.dup(transport._file)) as ours:
        return bool(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["close_notify", "no close_notify", "unread answer", "garbage"])
def test_the_end_is_reported_once(loop: str, how: str, contexts: Contexts) -> None:
    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder)
        await asyncio.to_thread(peer.sendall, b"last words")
        await recorder.until(lambda: recorder.got == b"last words")
        match how:
            case "close_notify":
                await asyncio.to_thread(peer.unwrap)
            case "no close_notify":
                socket.socket(fileno=peer.detach()).close()
            case "unread answer":
                recorder.transport.write(b"unread" * RECORD)
                socket.socket(fileno=peer.detach()).close()
            case "garbage":
                with socket.socket(fileno=peer.detach()) as raw:
                    raw.sendall(b"this is not TLS at all")
        await recorder.until(lambda: bool(recorder.ends))
        recorder.transport.write(b"ignored")
        recorder.transport.close()
        recorder.transport.abort()
        await asyncio.sleep(0)
        assert len(recorder.ends) == 1
        assert recorder.transport.is_closing()
        if how == "garbage":
            assert isinstance(recorder.ends[0], OSError)
        elif how.endswith("close_notify"):
            assert recorder.ends == [None]
        peer.close()

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_answer_is_not_lost_if_the_peer_closes_while_we_still_write(
    loop: str, version: ssl.TLSVersion, contexts: Contexts
) -> None:
    """The peer leaves bytes unread, so its kernel resets the connection."""

    async def main() -> None:
        recorder = Recorder()
        contexts[1].maximum_version = version
        peer = await a_pair(contexts, recorder, tcp_pair)
        recorder.transport.write(b"the first part of a body")
        # The loop does not run between the answer and the failing writes.
        peer.sendall(b"early answer")
        socket.socket(fileno=peer.detach()).close()
        for _ in range(10):
            recorder.transport.write(b"the rest of it")
        assert recorder.transport.get_write_buffer_size() == 0
        await recorder.until(lambda: bool(recorder.ends))
        assert recorder.got == b"early answer"
        peer.close()

    try:
        run(main(), loop)
    finally:
        contexts[1].maximum_version = ssl.TLSVersion.MAXIMUM_SUPPORTED


@pytest.mark.parametrize("loop", LOOPS)
def test_a_silent_handshake_ends_in_time_and_closes_the_socket(
    loop: str, contexts: Contexts
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with pytest.raises(TimeoutError):
            await start_tls(ours, contexts[0], Recorder, timeout_s=0.01)
        theirs.settimeout(60)
        assert await asyncio.to_thread(theirs.recv, 1) == b""
        theirs.close()

    run(main(), loop)


def test_a_connection_that_was_reset_before_the_handshake_is_closed(contexts: Contexts) -> None:
    """Health checks do this. A socket that is left open warns when it is freed."""

    async def main() -> None:
        ours, theirs = tcp_pair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        watch = select.poll()
        watch.register(ours, 0)
        assert watch.poll(60_000), "the reset has not arrived"
        with pytest.raises(OSError):  # noqa: PT011  # which one depends on the kernel
            await start_tls(ours, contexts[0], Recorder, timeout_s=60)
        assert ours.fileno() == -1

    run(main())
    gc.collect()


def test_closing_with_unsent_bytes_does_not_watch_for_more(contexts: Contexts) -> None:
    """Nobody reads them, so the loop would report them again and again, at full speed."""

    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder)
        file = recorder.transport._file
        recorder.transport.write(b"a" * (4 << 20))
        assert recorder.transport.get_write_buffer_size() > 0
        await asyncio.to_thread(peer.sendall, b"nobody reads this")
        recorder.transport.close()
        assert not asyncio.get_running_loop().remove_reader(file)
        assert len(await asyncio.to_thread(_everything, peer)) == 4 << 20
        await recorder.until(lambda: bool(recorder.ends))

    run(main(), "asyncio")  # uvloop does not return whether there was a reader


@pytest.mark.parametrize("loop", LOOPS)
def test_a_mistake_of_the_protocol_ends_the_connection(loop: str, contexts: Contexts) -> None:
    class Mistaken(Recorder):
        def buffer_updated(self, nbytes: int) -> None:
            raise ZeroDivisionError

    async def main() -> None:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context["exception"])
        )
        recorder = Mistaken()
        peer = await a_pair(contexts, recorder)
        await asyncio.to_thread(peer.sendall, b"bytes")
        await recorder.until(lambda: bool(recorder.ends))
        assert recorder.ends == reported
        assert isinstance(recorder.ends[0], ZeroDivisionError)
        peer.close()

    run(main(), loop)


def test_an_error_does_not_keep_the_buffer_of_the_protocol(contexts: Contexts) -> None:
    async def main() -> None:
        recorder = Recorder()
        peer = await a_pair(contexts, recorder)
        with socket.socket(fileno=peer.detach()) as raw:
            raw.sendall(b"this is not TLS at all")
        await recorder.until(lambda: bool(recorder.ends))
        assert isinstance(recorder.ends[0], OSError)
        assert recorder.ends[0].__traceback__ is None

    run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_large_buffer_is_filled_in_several_turns_of_the_loop(
    loop: str, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measuring(Recorder):
        pieces: tuple[int, ...] = ()

        def buffer_updated(self, nbytes: int) -> None:
            self.pieces += (nbytes,)
            super().buffer_updated(nbytes)

    async def main() -> None:
        recorder = Measuring(room=1 << 20)
        peer = await a_pair(contexts, recorder)
        recorder.transport.pause_reading()
        sent = bytes(range(250)) * 200
        await asyncio.to_thread(peer.sendall, sent)
        recorder.transport.resume_reading()
        await recorder.until(lambda: recorder.got == sent)
        assert max(recorder.pieces) <= 4096
        recorder.transport.abort()
        peer.close()

    monkeypatch.setattr(tls_transport, "_BYTES_PER_TURN", 4096)
    run(main(), loop)


def _everything(peer: ssl.SSLSocket) -> bytes:
    with peer:
        received = b""
        while piece := peer.recv(1 << 20):
            received += piece
        return received


class SmallRecords:
    """A peer that puts each byte into a record of its own."""

    def __init__(self, stream: socket.socket, context: ssl.SSLContext) -> None:
        self._stream = stream
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="127.0.0.1")

    def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._stream.sendall(self._out.read())
                self._in.write(self._stream.recv(1 << 16))
            else:
                self._stream.sendall(self._out.read())
                return

    def send(self, count: int) -> None:
        for _ in range(count):
            self._tls.write(b"x")
        self._stream.sendall(self._out.read())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_peer_that_sends_small_records_lets_others_go_first(
    loop: str, contexts: Contexts
) -> None:
    """Each record costs a call of OpenSSL: a megabyte of them would stall the loop for seconds."""
    count = 4000

    async def main() -> None:
        recorder = Recorder()
        ours, theirs = socket.socketpair()
        peer = SmallRecords(theirs, contexts[1])
        await asyncio.gather(
            asyncio.to_thread(peer.shake_hands),
            start_tls(ours, contexts[0], lambda: recorder, timeout_s=60),
        )
        recorder.transport.pause_reading()
        await asyncio.to_thread(peer.send, count)
        recorder.transport.resume_reading()
        most = 0
        while len(recorder.got) < count:
            before = len(recorder.got)
            await asyncio.sleep(0)
            most = max(most, len(recorder.got) - before)
        # A turn may read what was left over, and again because the socket has bytes.
        assert most <= 2 * tls_transport.RECORDS_PER_TURN
        recorder.transport.abort()
        theirs.close()

    run(main(), loop)


class KeyUpdates:
    """Makes key updates of TLS 1.3, which Python's `ssl` cannot, from the client's secret."""

    def __init__(self, secrets: Path) -> None:
        lines = [line.split() for line in secrets.read_text().splitlines()]
        [found] = [words[2] for words in lines if words[0] == "CLIENT_TRAFFIC_SECRET_0"]
        self._secret = bytes.fromhex(found)

    def records(self, count: int) -> bytes:
        """Each is the first one under its key."""
        head = b"\x17\x03\x03" + struct.pack(">H", 6 + 16)
        message = b"\x18\0\0\x01\0" + b"\x16"  # update_not_requested, in a handshake record
        made = b""
        for _ in range(count):
            key, nonce = self._expand(b"key", 32), self._expand(b"iv", 12)
            made += head + AESGCM(key).encrypt(nonce, message, head)
            self._secret = self._expand(b"traffic upd", 48)
        return made

    def _expand(self, name: bytes, length: int) -> bytes:
        label = b"tls13 " + name
        info = struct.pack(">HB", length, len(label)) + label + b"\0"
        return HKDFExpand(SHA384(), length, info).derive(self._secret)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("count", "end"), [(20, type(None)), (2000, ConnectionAbortedError)])
def test_a_peer_that_sends_many_records_without_data_is_cut_off(
    loop: str, count: int, end: type, contexts: Contexts, tmp_path: Path
) -> None:
    """OpenSSL handles them inside one call, 12 µs each, for as long as more arrive."""

    async def main() -> None:
        recorder = Recorder()
        contexts[1].keylog_filename = str(tmp_path / "secrets")
        try:
            peer = await a_pair(contexts, recorder, tcp_pair)
        finally:
            contexts[1].keylog_filename = None  # type: ignore[assignment]
        assert peer.cipher() == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
        recorder.transport.pause_reading()
        with socket.socket(fileno=peer.detach()) as plain:
            plain.sendall(KeyUpdates(tmp_path / "secrets").records(count))
            plain.shutdown(socket.SHUT_WR)
            recorder.transport.resume_reading()
            await recorder.until(lambda: bool(recorder.ends))
        assert [type(error) for error in recorder.ends] == [end]

    run(main(), loop)


def a_hello(context: ssl.SSLContext, record_bytes: int) -> bytes:
    """The first message of a client, in records of this length."""
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    whole = sent.read()
    head, message = whole[:3], whole[5:]
    parts = [message[at : at + record_bytes] for at in range(0, len(message), record_bytes)]
    return b"".join(head + struct.pack(">H", len(part)) + part for part in parts)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("record_bytes", [2, 1000])
def test_a_peer_that_sends_many_records_in_a_handshake_is_cut_off(
    loop: str, record_bytes: int, contexts: Contexts
) -> None:
    async def main() -> None:
        ours, theirs = tcp_pair()
        with theirs:
            theirs.sendall(a_hello(contexts[1], record_bytes))
            theirs.settimeout(60)
            opening = asyncio.create_task(start_tls(ours, contexts[0], Recorder, timeout_s=60))
            answer = asyncio.to_thread(theirs.recv, 1)
            if record_bytes > 2:
                assert await answer == b"\x16"  # the server's hello
            else:
                with pytest.raises(ConnectionResetError):
                    await answer
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_the_kernel_stores_does_not_count_as_taken_by_the_peer(
    loop: str, contexts: Contexts
) -> None:
    route = Buffered("GET", "/model", lambda exchange, _: exchange.answer(200, bytes(32 << 20)))

    async def main() -> None:
        async with (
            a_server([route], ssl=contexts[0]) as server,
            a_client(server.port, ssl=contexts[1], limit=1024) as client,
        ):
            client.send(a_request("GET", "/model"))
            await client.reader.readexactly(1)
            [connection] = server._state.connections
            out = connection._out
            while not out.unsent:
                await asyncio.sleep(0)
            assert 0 < out.taken < out.written - out.unsent
            client.writer.transport.abort()

    run(main(), loop)
