"""The door for other servers: their messages, and the token that opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from papaya.credentials.token_files import Secret
from papaya.errors import ProtocolError
from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, HttpRoute
from papaya.messages import wire
from papaya.server.auth import admits
from papaya.server.peers import MESSAGES_PATH, TAKEN, TO_HEADER, Peers


def message_route(peers: Peers) -> HttpRoute:
    """One-way messages to a machine of this process; 204 says that it came, no more."""

    def on_message(exchange: Exchange, body: bytes) -> None:
        host = peers.hosts.get(exchange.head.headers.get(TO_HEADER, ""))
        if host is None:
            raise ProtocolError("the node that this message is for does not run here")
        host.deliver(wire.between_servers.parse(body))
        exchange.answer(TAKEN)

    return Buffered("POST", MESSAGES_PATH, on_message, wire.MAX_MESSAGE_BYTES)


def guarded(routes: Iterable[HttpRoute], secret: Secret, refusal: bytes) -> list[HttpRoute]:
    """The same routes, for those who show the token; the others are answered 401 `refusal`, and
    nothing of what they send is kept.
    """

    def checked(exchange: Exchange) -> bool:
        if admits(secret, exchange.head.headers.get("authorization")):
            return True
        exchange.answer(401, refusal, (("WWW-Authenticate", "Bearer"),))
        return False

    return [_guarded(route, checked) for route in routes]


def _guarded(route: HttpRoute, is_admitted: Callable[[Exchange], bool]) -> HttpRoute:
    if isinstance(route, Buffered):
        return msgspec.structs.replace(route, admits=is_admitted)
    receive = route.receive
    return msgspec.structs.replace(
        route, receive=lambda exchange: receive(exchange) if is_admitted(exchange) else None
    )
