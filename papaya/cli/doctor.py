"""`papaya doctor`: checks an installation, says what is wrong and what to do about it.

It reads the configuration file and the data folder of a server on this machine, opens its database
and its bucket, and asks the running server. It changes nothing; in a bucket it writes and deletes
one object. Exits with 1 if there is a problem; warnings alone exit with 0.
"""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya import __version__
from papaya.attestation.policy import AttestationError, DevicePolicy
from papaya.attestation.software import SoftwarePlatform
from papaya.attestation.verify import Evidence, Verified, verify_evidence
from papaya.cli.admin_client import AdminClient, authority_file
from papaya.cli.deployment import DeploymentOptions, add_deployment
from papaya.cli.output import (
    Commands,
    add_format,
    bind,
    plural,
    print_data,
    print_json,
)
from papaya.cli.status import trouble
from papaya.config import Deployment
from papaya.config.deployment import ROLES, Role, address
from papaya.config.upload_routes import UploadRoutes
from papaya.credentials.tls import (
    AUTHORITY_HINT,
    CLOSED_HINT,
    UNNAMED_HINT,
    client_context,
    explain_connecting,
    is_of_another_name,
    unnamed_host,
)
from papaya.credentials.token_files import read
from papaya.device.trust import read_policy
from papaya.errors import OperatorError
from papaya.http.proxy_protocol import LOCAL_HEADER
from papaya.secagg.parameters import PublicParameters
from papaya.server.admin.views import SystemStatus
from papaya.server.certificates import Certificates
from papaya.server.node_names import is_alone
from papaya.server.open_files import (
    connections_within,
    least_files,
    listeners_of,
    raise_limit,
    shares_of,
)
from papaya.server.public_log import newest_checkpoint
from papaya.server.resources import open_bucket
from papaya.server.tsa import child_address
from papaya.store.clusters import open_postgresql, read_cluster, state_file
from papaya.store.state import APPLICATION_ID, SCHEMA_VERSION
from papaya.tsa.client import TsaClient
from papaya.tsa.errors import TsaRefused, Unavailable
from papaya.tsa.measurement import measure
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.reader import LogReader

_DAY_S = 86400.0
_RENEW_DAYS = 14
_COLLATERAL_DAYS = 30  # how long Intel's collateral is valid
_FREE_SHARE = 0.1
_ANSWER_S = 10.0  # enough for a busy server
_AUTHORITY = "set tls_authority to the PEM file of the certificate authority"
_SIGNS = {"good": "ok", "warning": "WARNING", "problem": "PROBLEM"}


class Diagnosis(msgspec.Struct, frozen=True):
    """What one check found. `hint` says what to do about a warning or a problem."""

    subject: str
    grade: Literal["good", "warning", "problem"]
    text: str
    hint: str = ""


class _Health(msgspec.Struct):
    papaya: str
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(DeploymentOptions):
    role: Role | None = None
    trust: Path | None = None


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Check a server's configuration, files, disk, database, bucket, certificates, "
        "addresses, clock and TSA, and say what to do about each problem. Run it on the server's "
        "machine. It changes nothing. Exits with 1 if there is a problem.",
    )
    parser.add_argument(
        "role",
        nargs="?",
        choices=ROLES,
        help="role of the server, if it runs one role (default: all roles in one process)",
    )
    add_deployment(
        parser.add_argument_group("server", "The same options as those of its `papaya serve`.")
    )
    parser.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        help="trust policy of your devices: check the log and the TSA as they do (default: none; "
        "only a log that the server keeps itself can then be checked)",
    )
    add_format(parser)
    bind(parser, DoctorOptions, run)


def run(options: DoctorOptions) -> int:
    findings = list(examine(options))
    if options.is_json:
        print_json(findings)
    else:
        print_data("\n".join(_lines(findings)))
    return 1 if any(finding.grade == "problem" for finding in findings) else 0


def examine(options: DoctorOptions) -> Iterator[Diagnosis]:
    try:
        deployment = options.deployment()
    except OperatorError as error:
        yield Diagnosis("configuration", "problem", str(error), error.hint)
        return
    yield Diagnosis("configuration", "good", str(options.config or "defaults, no file"))
    checks: tuple[tuple[str, Callable[[Deployment], Iterator[Diagnosis]]], ...] = (
        ("data folder", _data_folder),
        ("state", _sqlite if deployment.state is None else _postgresql),
        ("blobs", _blobs),
        ("open files", partial(_open_files, options.role)),
        ("certificate", partial(_certificates, options.role)),
        ("addresses", partial(_listeners, options.role)),
        ("upload_url", partial(_upload_url, options.role)),
        ("upload_routes", partial(_upload_routes, options.role)),
        ("server", _running_server),
        ("TSA", _collateral),
        ("TSA", partial(_evidence, options)),
        ("log", partial(_log, options)),
    )
    for subject, check in checks:
        try:
            yield from check(deployment)
        except OperatorError as error:
            yield Diagnosis(subject, "problem", str(error), error.hint)
        except OSError as error:
            reason = f"cannot read {error.filename}: {error.strerror}"
            yield Diagnosis("files", "problem", reason, "run as the user who runs the server")
        except ValueError as error:  # such as bytes in a text file
            hint = "restore the data folder from a backup"
            yield Diagnosis(subject, "problem", f"a file is damaged: {error}", hint)


def _roles(role: Role | None) -> tuple[Role, ...]:
    return ROLES if role is None else (role,)


def _lines(findings: list[Diagnosis]) -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        sign = _SIGNS[finding.grade]
        yield f"{sign:<8} {finding.subject:<{width}}  {finding.text}"
        if finding.hint:
            yield f"{'':<8} {'':<{width}}  hint: {finding.hint}"


def _data_folder(deployment: Deployment) -> Iterator[Diagnosis]:
    folder = Path(deployment.data)
    if not folder.is_dir():
        yield Diagnosis(
            "data folder",
            "problem",
            f"there is no folder {folder}",
            "run `papaya serve` once to create it, or name it with --config or --data",
        )
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        text = f"this user cannot write to {folder}"
        yield Diagnosis("data folder", "problem", text, "run as the user who runs the server")
    for secret in sorted([*folder.glob("*.token"), *folder.glob("*.key"), folder / "state.db"]):
        if secret.exists() and stat.S_IMODE(secret.stat().st_mode) & 0o077:
            text = f"{secret} contains secrets and is readable by other users"
            yield Diagnosis("data folder", "problem", text, f"chmod 600 {secret}")
    usage = shutil.disk_usage(folder)
    free = f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB are free"
    if usage.free < _FREE_SHARE * usage.total:
        hint = "free space, or lower keep_versions: without space nothing can be committed"
        yield Diagnosis("disk", "warning", f"only {free} at {folder}", hint)
    else:
        yield Diagnosis("disk", "good", f"{free} at {folder}")


def _sqlite(deployment: Deployment) -> Iterator[Diagnosis]:
    path = state_file(Path(deployment.data))
    if not path.exists():
        return
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_ANSWER_S)
    try:
        [[program]] = connection.execute("PRAGMA application_id")
        [[version]] = connection.execute("PRAGMA user_version")
        if program != APPLICATION_ID:
            text = f"{path} belongs to another program"
            yield Diagnosis("state", "problem", text, "use another data folder")
            return
        if version > SCHEMA_VERSION:
            text = f"{path} has schema version {version}, not {SCHEMA_VERSION}"
            yield Diagnosis("state", "problem", text, "use the version of Papaya that wrote it")
            return
        [[verdict], *_] = connection.execute("PRAGMA quick_check(1)")
        if verdict == "ok":
            yield Diagnosis("state", "good", f"{path} is consistent")
        else:
            hint = "restore it and the blobs from the same backup"
            yield Diagnosis("state", "problem", f"{path} is damaged: {verdict}", hint)
    except sqlite3.Error as error:
        hint = "restore it and the blobs from the same backup, or use another data folder"
        yield Diagnosis("state", "problem", f"cannot read {path}: {error}", hint)
    finally:
        connection.close()


def _postgresql(deployment: Deployment) -> Iterator[Diagnosis]:
    name, cluster = f"papaya doctor {os.getpid()}", read_cluster(Path(deployment.data))
    url = str(deployment.state)
    with closing(open_postgresql(url, name, cluster=cluster, may_create=False)) as database:
        others = plural(database.others(), "server")
        yield Diagnosis("state", "good", f"{database} on PostgreSQL, {others} connected")


def _blobs(deployment: Deployment) -> Iterator[Diagnosis]:
    if deployment.blobs:
        bucket = open_bucket(deployment, "doctor")
        yield Diagnosis("blobs", "good", f"{bucket.where} can be written")


def _open_files(role: Role | None, deployment: Deployment) -> Iterator[Diagnosis]:
    limit, wanted = raise_limit(), deployment.max_connections
    hint = "ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit of the server"
    shares = shares_of(_roles(role), deployment)
    if limit < (least := least_files(shares)):
        text = f"the limit is {limit} files, but this server needs {least}"
        yield Diagnosis("open files", "problem", text, hint)
    elif (given := connections_within(limit, wanted, shares)) < wanted:
        text = (
            f"{limit:,} is too low for max_connections = {wanted:,}: each listener takes {given:,}"
        )
        yield Diagnosis("open files", "warning", text, hint)
    else:
        yield Diagnosis("open files", "good", f"up to {limit:,}")


def _certificates(role: Role | None, deployment: Deployment) -> Iterator[Diagnosis]:
    is_local = address("devices", deployment.devices)[0] in ("127.0.0.1", "localhost", "::1")
    if deployment.tls_certificate is None and not is_local:
        text = f"devices = {deployment.devices} without TLS: others can read and change updates"
        hint = "set tls_certificate and tls_key, or terminate TLS in a proxy on this machine"
        yield Diagnosis("certificate", "warning", text, hint)
    host = None
    if not is_alone(_roles(role), deployment):
        host, _ = address("servers", deployment.announce or deployment.servers)
    if why := unnamed_host(deployment, host):
        yield Diagnosis("certificate", "problem", why, UNNAMED_HINT)
    for setting, expires_at in Certificates(deployment, _roles(role), host).expiry.items():
        days = (expires_at - time.time()) / _DAY_S
        text = f"{setting} {getattr(deployment, setting)} expires in {days:.0f} days"
        if days < _RENEW_DAYS:
            yield Diagnosis("certificate", "warning", text, "renew it")
        else:
            yield Diagnosis("certificate", "good", text)


def _listeners(role: Role | None, deployment: Deployment) -> Iterator[Diagnosis]:
    for name in listeners_of(_roles(role), deployment):
        configured = getattr(deployment, name)
        host, port = address(name, configured)
        if port == 0:
            continue
        try:
            socket.create_connection((host, port), _ANSWER_S).close()
        except OSError as error:
            text = f"{configured} does not answer: {error.strerror or error}"
            hint = (
                f"start the server with `papaya serve`; if it was started with --{name}, give "
                "doctor the same option; or check the firewall"
            )
            yield Diagnosis(f"{name} address", "problem", text, hint)
        else:
            yield Diagnosis(f"{name} address", "good", f"{configured} answers")


def _upload_url(role: Role | None, deployment: Deployment) -> Iterator[Diagnosis]:
    """Connects as a device does. The URL is for devices, and may not be reachable from here."""
    url = deployment.upload_url
    if not url or role not in (None, "aggregator"):
        return
    parts = urlsplit(url)
    assert parts.hostname is not None
    where = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    try:
        with socket.create_connection(where, _ANSWER_S) as plain:
            if parts.scheme == "https":
                tls = client_context(deployment.tls_authority)
                tls.wrap_socket(plain, server_hostname=parts.hostname).close()
    except OSError as error:
        problem, hint = explain_connecting(error, url)
        text = f"{url}: {problem}; devices that cannot use it upload through selectors"
        hint = _own_setting(hint) or "check the name and the firewall"
        yield Diagnosis("upload_url", "warning", text, hint)
    else:
        yield Diagnosis("upload_url", "good", f"{url} answers")


def _upload_routes(role: Role | None, deployment: Deployment) -> Iterator[Diagnosis]:
    """Sends a PROXY header as a selector does, then does a TLS handshake as a device does."""
    if role not in (None, "selector"):
        return
    routes = UploadRoutes(deployment.upload_routes)
    for name, target in deployment.upload_routes.items():
        if name.startswith("*"):
            text = (
                f"{name} = {target}: not checked, because * can be any name; run papaya doctor "
                "aggregator on each aggregator"
            )
            yield Diagnosis("upload_routes", "good", text)
            continue
        where = routes.find(name)
        assert where is not None
        context = client_context(deployment.tls_authority)
        try:
            with (
                socket.create_connection(where, _ANSWER_S) as plain,
                context.wrap_socket(
                    plain, server_hostname=name, do_handshake_on_connect=False
                ) as tls,
            ):
                socket.socket.sendall(tls, LOCAL_HEADER)  # not through TLS
                tls.do_handshake()
        except OSError as error:
            problem, hint = explain_connecting(error, f"https://{name}")
            text = f"{name} at {target}: {problem}; devices upload through selectors instead"
            hint = _own_setting(hint) or "check that the aggregator runs, its address, the firewall"
            if hint == CLOSED_HINT:
                hint = (
                    "at the aggregator, add the address of this selector to proxies; check that "
                    f"{target} is its listener `devices`"
                )
            yield Diagnosis("upload_routes", "warning", text, hint)
        else:
            yield Diagnosis("upload_routes", "good", f"{name} at {target} answers")


def _own_setting(hint: str) -> str:
    """Other commands have an option for the authority; this one reads the configuration."""
    return _AUTHORITY if hint == AUTHORITY_HINT else hint


def _running_server(deployment: Deployment) -> Iterator[Diagnosis]:
    """Asks the admin API: versions, leader, reports, clocks."""
    host, port = address("admin", deployment.admin)
    token = Path(deployment.data) / "admin.token"
    if port == 0 or not token.exists():
        return
    if deployment.tls_certificate is not None or deployment.tls_authority is not None:
        client_context(deployment.tls_authority)  # raises with the reason
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme = "http" if deployment.tls_certificate is None else "https"
    authority = authority_file(deployment.tls_authority)
    client = AdminClient(f"{scheme}://{at}", read(token).reveal(), authority)
    try:
        running = client.get("/health", _Health).papaya
        status = client.get("/admin/status", SystemStatus)
    except OperatorError as error:
        if is_of_another_name(error.__cause__):  # this connects to the address, not to a name
            hint = "use a name in the certificate: papaya status --admin https://NAME:PORT"
            yield Diagnosis("server", "warning", f"not checked: {error}", hint)
        else:
            yield Diagnosis("server", "problem", str(error), _own_setting(error.hint))
        return
    if running != __version__:
        text = f"the server runs Papaya {running}, this command is {__version__}"
        yield Diagnosis("version", "warning", text, "restart the server after an upgrade")
    problems = trouble(status)
    for problem in problems:
        yield Diagnosis("server", "problem", problem, "papaya status")
    for clock in status.clocks:
        if not clock.is_refused:
            yield Diagnosis("clock", "warning", str(clock), "set the clock with NTP")
    if not problems:
        tasks = plural(running_tasks(status), "running task")
        yield Diagnosis("server", "good", f"led by {status.leader}, {tasks}")


def running_tasks(status: SystemStatus) -> int:
    """Without evaluations, like `papaya task list`."""
    return sum(task.state == "running" and not task.evaluates for task in status.tasks)


def _collateral(deployment: Deployment) -> Iterator[Diagnosis]:
    if deployment.tsa_platform == "software":
        if deployment.tsa_addresses:
            text = "tsa_platform = software: INSECURE, its evidence proves nothing"
            yield Diagnosis("TSA", "warning", text, "run the TSA in SGX or TDX: docs/deploy-tsa.md")
        return
    path = Path(deployment.tsa_collateral or "")
    age_days = (time.time() - path.stat().st_mtime) / _DAY_S
    text = f"the collateral in {path} is {age_days:.0f} days old"
    hint = "fetch it again from Intel: docs/deploy-tsa.md"
    if age_days > _COLLATERAL_DAYS:
        yield Diagnosis("TSA", "problem", f"{text}; devices refuse it", hint)
    elif age_days > _COLLATERAL_DAYS - _RENEW_DAYS:
        yield Diagnosis("TSA", "warning", text, hint)
    else:
        yield Diagnosis("TSA", "good", text)


def _policy(options: DoctorOptions, deployment: Deployment) -> DevicePolicy | None:
    """What devices demand: their policy, or for a log that the server keeps itself, its key."""
    if options.trust is not None:
        return read_policy(options.trust)
    own = Path(deployment.data) / "log.key.pub"
    if deployment.log is not None or not own.exists():
        return None
    return DevicePolicy(
        log_key=own.read_text(encoding="ascii").strip(),
        platforms=("software",),
        allow_insecure_software=True,
        allow_smt=True,
    )


def _evidence(options: DoctorOptions, deployment: Deployment) -> Iterator[Diagnosis]:
    """Asks each TSA for a quote over parameters made here, and checks it as a device does."""
    addresses = deployment.tsa_addresses
    if not addresses:
        child = child_address(Path(deployment.data))
        if not _listens(child):
            if options.role in (None, "aggregator"):
                text = "no `tsa` is set: the server starts a child TSA when a secure task runs"
                yield Diagnosis("TSA", "good", text)
            return
        addresses = (child,)
    policy = _policy(options, deployment)
    for where in addresses:
        if policy is None:
            text = f"the quote of the TSA at {where} was not checked"
            yield Diagnosis("TSA", "warning", text, "add --trust FILE, the policy of your devices")
            continue
        try:
            verified = _verified(deployment, where, policy)
        except Unavailable as error:
            hint = "start it, or correct `tsa`: docs/deploy-tsa.md"
            yield Diagnosis("TSA", "problem", str(error), hint)
        except (AttestationError, TsaRefused, LogError) as error:
            hint = getattr(error, "hint", "") or "secure tasks wait: devices refuse this TSA"
            yield Diagnosis("TSA", "problem", f"{where}: {error}", hint)
        else:
            words = "INSECURE software" if verified.insecure else verified.quoted.platform
            text = f"{where}: the {words} quote is of the binary in record {verified.leaf_index}"
            yield Diagnosis("TSA", "good", text)


def _listens(address: str) -> bool:
    """A child TSA that was killed leaves its socket behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(address.removeprefix("unix:"))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            pass  # the connection that checks its quote says why
    return True


def _verified(deployment: Deployment, where: str, policy: DevicePolicy) -> Verified:
    now, data = time.time(), Path(deployment.data)
    # No task has this name, and the key is new: nothing of the cluster is touched.
    parameters = PublicParameters(
        task="papaya-doctor",
        length=1,
        aggregation_goal=1,
        threshold=1,
        clip=1.0,
        max_examples=1,
        max_staleness=0,
    )
    dial = Certificates(deployment, ("aggregator",), None).dial_tsa
    key = Ed25519PrivateKey.generate()
    with TsaClient(where, key, _ANSWER_S, _ANSWER_S, dial) as tsa:
        digest = tsa.register(parameters)
        try:
            quote = tsa.evidence(digest)
        finally:
            tsa.forget(digest)
        identity = tsa.identity_public_key
    leaf = deployment.tsa_leaf
    if deployment.tsa_platform == "software":
        collateral = SoftwarePlatform(measure()).collateral(now)
        if (own := data / "log.leaf").exists():
            leaf = _own_leaf(own)
    else:
        collateral = Path(deployment.tsa_collateral or "").read_bytes()
    return verify_evidence(
        Evidence(deployment.tsa_platform, quote, collateral),
        identity_key=identity,
        parameters_hash=digest,
        leaf_index=leaf,
        policy=policy,
        reader=LogReader(LogFolder(_log_folder(deployment)).fetch, policy.log_policy()),
        now=now,
    )


def _own_leaf(path: Path) -> int:
    """The number of the record that the server has appended for its own TSA."""
    try:
        _, number = path.read_bytes().split()
        return int(number)
    except ValueError as error:
        raise OperatorError(
            f"{path} is damaged", hint="delete it: a restarted server writes it again"
        ) from error


def _log_folder(deployment: Deployment) -> Path:
    return Path(deployment.log or Path(deployment.data) / "log")


def _log(options: DoctorOptions, deployment: Deployment) -> Iterator[Diagnosis]:
    """Whether the public log can be served, is signed, and has the record of the TSA."""
    folder = _log_folder(deployment)
    if not folder.exists() and deployment.log is None:
        return
    found = newest_checkpoint(folder)
    if found is None:
        hint = "publish the log there again, or correct `log`: papaya log show --help"
        yield Diagnosis("log", "problem", f"{folder} has no valid checkpoint", hint)
        return
    if deployment.tsa_leaf >= found.size:
        text = f"tsa_leaf = {deployment.tsa_leaf}, but {folder} has {plural(found.size, 'record')}"
        hint = "append the record of your TSA binary, or set tsa_leaf to its number"
        yield Diagnosis("log", "problem", text, hint)
        return
    text = f"{folder} has {plural(found.size, 'record')}"
    policy = _policy(options, deployment)
    if policy is None:
        hint = "add --trust FILE, the policy of your devices"
        yield Diagnosis("log", "warning", f"{text}; its signatures were not checked", hint)
        return
    reader = LogReader(LogFolder(folder).fetch, policy.log_policy())
    try:
        reader.refresh(time.time())
        reader.entries()
    except LogError as error:
        hint = "devices refuse this log: publish it again from the machine that has its key"
        yield Diagnosis("log", "problem", f"{text}, which fail a check: {error}", hint)
    else:
        yield Diagnosis("log", "good", f"{text}, signed by {found.origin}")
