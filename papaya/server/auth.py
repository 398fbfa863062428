"""Bearer tokens of devices, of servers among each other, and of the admin API.

    shared                 every device shows the token in device.token; the log says that one
                           device can then take part many times
    signed                 each device has its own, made by `papaya token make`: id, expiry, HMAC
    none                   everybody; INSECURE, and the log says so at every start
    package.module:name    the operator's own `DeviceVerifier`, called without arguments

A token lets a device check in; what it may do after that is in its tickets. A verifier that raises
or takes too long refuses the device. Tokens are never logged. Of an error in a verifier only the
class and the line are logged, because the message may contain the token.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import math
import re
import time
import traceback
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from papaya.config.deployment import Deployment
from papaya.credentials.tls import roles_of
from papaya.credentials.token_files import MAX_TOKEN_CHARS, TOKEN_FORM, Secret, read_or_make
from papaya.errors import OperatorError
from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, HttpRoute
from papaya.messages.events import CredentialsRejected
from papaya.server.logs import log

logger = logging.getLogger("papaya.auth")

VERIFIER_TIMEOUT_S = 5.0
REMEMBERED_S = 60.0
MAX_REMEMBERED = 20_000
DAY_S = 86_400.0
_SCHEME = "bearer "
_DEVICE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_EXPIRES = 10**12 - 1  # as many digits as _SIGNED allows
_SIGNED = re.compile(r"papaya1\.([A-Za-z0-9_-]{1,64})\.([1-9][0-9]{0,11})\.([A-Za-z0-9_-]{43})")
_LIKE_SIGNED = re.compile(r"papaya1\.([A-Za-z0-9_-]{1,64})\.")  # also damaged or cut off


class Undecided(Enum):
    """The verifier has to be awaited."""

    UNDECIDED = "undecided"


UNDECIDED: Final = Undecided.UNDECIDED
Verdict: TypeAlias = str | None
"""A device's identity, "" if its token is shared, None if it is refused."""


class DeviceVerifier(Protocol):
    """The operator's own verifier. It is awaited on the server's loop, so it must not block."""

    async def verify(self, token: str) -> Verdict: ...


@runtime_checkable
class ImmediateVerifier(Protocol):
    """A verifier that answers at once and is not awaited."""

    def verify_now(self, token: str) -> Verdict: ...


class SharedToken:
    """One token for all devices; it does not identify a device."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def verify_now(self, token: str) -> Verdict:
        return "" if self._secret.matches(token) else None


def check_device_id(device: str, command: str, *, is_signed: bool = True) -> None:
    """Refuse a token or a part of one, without quoting it. If `is_signed`, also refuse an id that
    no signed token can have; a verifier of the operator's own may use other ids.

    `command`: what the hint tells the user to run with the id.
    """
    if (token := _LIKE_SIGNED.search(device)) is not None:
        raise OperatorError(
            f"this is a token; the device is {token[1]}", hint=f"{command} {token[1]}"
        )
    if is_signed and _DEVICE_ID.fullmatch(device) is None:
        raise OperatorError("invalid device id", hint="use 1 to 64 characters of A-Z a-z 0-9 _ -")


class SignedTokens:
    """`papaya1.DEVICE.EXPIRES.MAC`: HMAC-SHA256 over all before the last dot, base64url.

    Compared as text, so that each device and expiry have exactly one valid token.
    """

    def __init__(self, key: Secret, now: Callable[[], float] = time.time) -> None:
        self._keyed = hmac.new(key.reveal().encode(), digestmod="sha256")
        self._now = now

    def make(self, device: str, days: float) -> Secret:
        check_device_id(device, "papaya token make --device")
        signed = f"papaya1.{device}.{int(self._now() + days * DAY_S)}"
        token = f"{signed}.{self._mac(signed)}"
        if _SIGNED.fullmatch(token) is None:
            most = int((_MAX_EXPIRES - self._now()) / DAY_S)
            raise OperatorError(
                f"--days {days:g} is too large", hint=f"use at most {most}, for example --days 365"
            )
        return Secret(token)

    def verify_now(self, token: str) -> Verdict:
        found = _SIGNED.fullmatch(token)
        if found is None:
            return None
        device, expires, mac = found.groups()
        if not hmac.compare_digest(self._mac(token[: found.start(3) - 1]), mac):
            return None
        return device if self._now() < int(expires) else None

    def _mac(self, signed: str) -> str:
        mac = self._keyed.copy()
        mac.update(signed.encode())
        return urlsafe_b64encode(mac.digest()).rstrip(b"=").decode()


class OpenDoor:
    """Accepts every device."""

    def verify_now(self, token: str) -> Verdict:
        return ""


def bearer(authorization: str | None) -> str | None:
    """The token of an Authorization header, None if it is not exactly `Bearer <token>`."""
    start = len(_SCHEME)
    if authorization is None or len(authorization) > start + MAX_TOKEN_CHARS:
        return None
    if authorization[:start].lower() != _SCHEME:
        return None
    token = authorization[start:]
    return token if TOKEN_FORM.fullmatch(token) is not None else None


def admits(secret: Secret, authorization: str | None) -> bool:
    """Whether the header has this token; for the admin API and for other servers."""
    token = bearer(authorization)
    return token is not None and secret.matches(token)


class DeviceAuth:
    """Verifies devices. Call `verify_now` first, and `verify` if that returns UNDECIDED.

    A device that the operator's own verifier accepted is remembered for a minute, by the hash of
    its token, so that another check-in does not query a database again. Refusals are not
    remembered.
    """

    def __init__(
        self,
        verifier: DeviceVerifier | ImmediateVerifier,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._immediate = verifier if isinstance(verifier, ImmediateVerifier) else None
        self._awaited = None if isinstance(verifier, ImmediateVerifier) else verifier
        self._is_open = isinstance(verifier, OpenDoor)
        self._now = now
        self._remembered: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def verify_now(self, authorization: str | None) -> Verdict | Literal[Undecided.UNDECIDED]:
        if self._is_open:
            return ""
        token = bearer(authorization)
        if token is None:
            return None
        if self._immediate is None:
            device, until = self._remembered.get(_digest(token), ("", -math.inf))
            return device if self._now() < until else UNDECIDED
        try:
            return _checked(self._immediate.verify_now(token))
        except Exception as error:
            _log_failure(error)
            return None

    async def verify(self, authorization: str | None) -> Verdict:
        verdict = self.verify_now(authorization)
        if verdict is not UNDECIDED:
            return verdict
        token = bearer(authorization)
        assert token is not None
        assert self._awaited is not None
        try:
            async with asyncio.timeout(VERIFIER_TIMEOUT_S):
                device = _checked(await self._awaited.verify(token))
        except Exception as error:
            _log_failure(error)
            return None
        if device is not None:
            self._remember(token, device)
        return device

    def _remember(self, token: str, device: str) -> None:
        key = _digest(token)
        self._remembered[key] = (device, self._now() + REMEMBERED_S)
        self._remembered.move_to_end(key)
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


def _checked(verdict: object) -> Verdict:
    """Check the type: a verifier that returns True, for example, has another interface."""
    if verdict is None or isinstance(verdict, str):
        return verdict
    raise TypeError("a verifier must return a str or None")


def _log_failure(error: Exception) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
    logger.error("device refused: the verifier raised %s at %s", type(error).__name__, place)


def verifier_for(
    deployment: Deployment, data: Path, now: Callable[[], float] = time.time
) -> DeviceAuth:
    """The verifier that `device_tokens` names; creates the token file that it needs."""
    match deployment.device_tokens:
        case "shared":
            logger.warning(
                'device_tokens = "shared": devices cannot be told apart, so one device can hold '
                'many sessions and many places in a buffer (hint: device_tokens = "signed")'
            )
            return DeviceAuth(SharedToken(read_or_make(data, "device.token")))
        case "signed":
            return DeviceAuth(SignedTokens(read_or_make(data, "device.key"), now))
        case "none":
            logger.warning(
                'INSECURE: device_tokens = "none": anyone who reaches %s can take part in '
                "training, any number of times",
                deployment.devices,
            )
            return DeviceAuth(OpenDoor())
        case path:
            return DeviceAuth(_own_verifier(path))


def _own_verifier(path: str) -> DeviceVerifier:
    module, _, name = path.partition(":")
    try:
        verifier = getattr(import_module(module), name)()
    except Exception as error:  # the operator's code may raise anything
        raise OperatorError(
            f"cannot create the verifier {path}: {type(error).__name__}: {error}",
            hint="install its package beside papaya, or set PYTHONPATH; the name after the colon "
            "is called without arguments",
        ) from error
    if not inspect.iscoroutinefunction(getattr(verifier, "verify", None)):
        raise OperatorError(
            f"the verifier {path} has no `async def verify`",
            hint="write: async def verify(self, token: str) -> str | None",
        )
    found: DeviceVerifier = verifier
    return found


def guarded(
    routes: Iterable[HttpRoute],
    secret: Secret,
    refusal: bytes,
    role: str = "",
) -> list[HttpRoute]:
    """The same routes, but a request without the token gets 401 and `refusal`, and its body is not
    kept. `role`, if it is given, must be named by the peer's certificate.
    """

    def checked(exchange: Exchange) -> bool:
        if role and role not in roles_of(exchange.certificate):
            # 503, because the device whose request this is has done nothing wrong.
            exchange.answer_problem(503, f"only the role {role} passes requests on")
            return False
        if admits(secret, exchange.head.headers.get("authorization")):
            return True
        exchange.answer(401, refusal, (("WWW-Authenticate", "Bearer"),))
        log(CredentialsRejected("servers", exchange.peer.rpartition(":")[0]))
        return False

    return [_guarded(route, checked) for route in routes]


def _guarded(route: HttpRoute, is_admitted: Callable[[Exchange], bool]) -> HttpRoute:
    if isinstance(route, Buffered):
        return msgspec.structs.replace(route, admits=is_admitted)
    receive = route.receive
    return msgspec.structs.replace(
        route, receive=lambda exchange: receive(exchange) if is_admitted(exchange) else None
    )
