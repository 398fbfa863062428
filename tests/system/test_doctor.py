"""`papaya doctor`: a healthy server passes, and each planted problem is found and named."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from papaya.cli import doctor
from papaya.cli.doctor import Diagnosis, DoctorOptions, examine, run
from papaya.cli.main import main
from papaya.config import AsyncFL, SecureAggregation, TaskConfig
from papaya.http.proxy_protocol import LOCAL_HEADER
from papaya.store.postgresql import PostgresState
from tests.postgresql import postgres
from tests.s3.server import BUCKET, key_file, s3_server
from tests.system.admin import Admin
from tests.system.processes import CALM, Installation
from tests.system.test_secure import STEP_S, until
from tests.system.tls import Authority, make_certificates

Plant = Callable[[Path, Path], None]


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    """`papaya doctor` waits ten seconds for an answer: too short on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_ANSWER_S", STEP_S)
        yield


def found(config: Path) -> list[Diagnosis]:
    return [each for each in examine(DoctorOptions(config=config)) if each.grade != "good"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a server that ran and was stopped. Its addresses stay reserved, so that
    nobody answers there.
    """
    with Installation(tmp_path_factory.mktemp("doctor")) as installation:
        server = installation.add(server=CALM).start()
        config = installation.folder / "server.toml"
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        known = ("leads", "selectors", "aggregators")
        admin.until("/admin/status", lambda found: all(found[name] for name in known), STEP_S)
        assert run(DoctorOptions(config=config, format="json")) == 0, "the running server"
        graded = {each.subject: each.grade for each in examine(DoctorOptions(config=config))}
        _check_addresses_on_the_command_line(config)
        for subject in ("configuration", "state", "admin address", "devices address", "server"):
            assert graded[subject] == "good"
        assert server.stop() == 0
        yield config


def _check_addresses_on_the_command_line(config: Path) -> None:
    """They are those of `papaya serve`, and override the file."""
    [where] = [line for line in config.read_text().splitlines() if line.startswith("admin")]
    bare = config.with_name("bare.toml")
    bare.write_text(config.read_text().replace(where, "admin = '127.0.0.1:1'"))
    wrong = [each for each in found(bare) if each.subject == "admin address"]
    assert [each.grade for each in wrong] == ["problem"]
    assert "started with --admin" in wrong[0].hint
    right = where.partition("=")[2].strip().strip("\"'")
    assert main(["doctor", "--config", str(bare), "--admin", right]) == 0


def _token_for_everyone(config: Path, data: Path) -> None:
    (data / "admin.token").chmod(0o644)


def _damaged_state(config: Path, data: Path) -> None:
    content = bytearray((data / "state.db").read_bytes())
    content[100:] = os.urandom(len(content) - 100)
    (data / "state.db").write_bytes(content)


def _state_of_another_program(config: Path, data: Path) -> None:
    content = bytearray((data / "state.db").read_bytes())
    content[68:72] = b"ELSE"
    (data / "state.db").write_bytes(content)


def _misspelt_setting(config: Path, data: Path) -> None:
    config.write_text("heartbeet_s = 1\n" + config.read_text())


def _no_data(config: Path, data: Path) -> None:
    data.rename(data.with_name("moved"))


def _missing_certificate(config: Path, data: Path) -> None:
    config.write_text("tls_certificate = 'none.pem'\ntls_key = 'none.key'\n" + config.read_text())


def _missing_certificate_of_servers(config: Path, data: Path) -> None:
    names = ("servers_certificate", "servers_key", "servers_authority")
    own = "".join(f"{name} = 'none.pem'\n" for name in names)
    config.write_text(own + config.read_text())


def _no_database(config: Path, data: Path) -> None:
    config.write_text("state = 'postgresql://papaya@127.0.0.1:1/papaya'\n" + config.read_text())


def _no_bucket(config: Path, data: Path) -> None:
    keys = f"blobs_credentials = '{key_file(data)}'\n"
    own = f"blobs = 's3://papaya/here'\nblobs_endpoint = 'http://127.0.0.1:1'\n{keys}"
    config.write_text(own + config.read_text())


def _old_collateral(config: Path, data: Path) -> None:
    collateral = data / "collateral.json"
    collateral.write_text("{}")
    os.utime(collateral, (0, time.time() - 40 * 86400))
    own = f"tsa = 'tcp:127.0.0.1:1'\ntsa_platform = 'sgx'\ntsa_collateral = '{collateral}'\n"
    config.write_text(own + f"log = '{data}'\n" + config.read_text())


def _log_without_the_record(config: Path, data: Path) -> None:
    (data / "log").mkdir()
    root = base64.b64encode(bytes(32)).decode()
    note = f"example.com/log\n1\n{root}\n\n— example.com/log {root}\n"
    (data / "log" / "checkpoint").write_text(note)
    config.write_text("tsa_leaf = 3\n" + config.read_text())


def _log_that_is_no_log(config: Path, data: Path) -> None:
    (data / "log").mkdir()
    (data / "log" / "checkpoint").write_bytes(b"\xff")


@pytest.mark.parametrize(
    ("plant", "subject", "text", "hint"),
    [
        (_token_for_everyone, "data folder", "readable by other users", "chmod 600"),
        (_damaged_state, "state", "state.db", "backup"),
        (_state_of_another_program, "state", "another program", "another data folder"),
        (_misspelt_setting, "configuration", "heartbeet_s", "did you mean heartbeat_s"),
        (_no_data, "data folder", "there is no folder", "papaya serve"),
        (_missing_certificate, "certificate", "none.pem", "relative to the configuration file"),
        (_missing_certificate_of_servers, "certificate", "none.pem", "configuration file"),
        (_no_database, "state", "PostgreSQL failed", "check that PostgreSQL runs"),
        (_no_bucket, "blobs", "s3://papaya/here: the store cannot be reached", "check the network"),
        (_old_collateral, "TSA", "40 days old", "fetch it again"),
        (_log_without_the_record, "log", "tsa_leaf = 3, but", "set tsa_leaf"),
        (_log_that_is_no_log, "log", "no valid checkpoint", "correct `log`"),
    ],
)
def test_a_planted_problem_is_found(
    stopped: Path, tmp_path: Path, plant: Plant, subject: str, text: str, hint: str
) -> None:
    copied = tmp_path / "data"
    copied.mkdir()
    [data] = [
        line.split("=")[1].strip().strip("\"'")
        for line in stopped.read_text().splitlines()
        if line.startswith("data")
    ]
    for file in Path(data).iterdir():
        if file.is_file():
            (copied / file.name).write_bytes(file.read_bytes())
            (copied / file.name).chmod(file.stat().st_mode)
    config = tmp_path / "papaya.toml"
    config.write_text(stopped.read_text().replace(data, str(copied)))
    assert {each.subject for each in found(config)} == {
        "devices address",
        "admin address",
        "server",
    }, "the server was stopped, nothing else is wrong"
    plant(config, copied)
    assert run(DoctorOptions(config=config)) == 1
    matching = [each for each in found(config) if each.subject == subject and text in each.text]
    assert matching
    assert hint in matching[0].hint


def test_the_tsa_and_the_log_are_checked_as_devices_do(tmp_path: Path) -> None:
    """With a secure task the server starts a TSA and writes its binary into a log of its own."""
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        config = installation.folder / "server.toml"
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        secure = TaskConfig(
            task="masked",
            concurrency=2,
            model_length=4,
            regime=AsyncFL(aggregation_goal=2),
            clip=1.0,
            max_examples=1,
            secure_aggregation=SecureAggregation(),
        )
        admin.submit(secure)
        checkpoint = installation.data / "log" / "checkpoint"
        until(lambda: checkpoint.exists() and b"\n1\n" in checkpoint.read_bytes(), "a record")

        def diagnosed() -> list[str]:
            options = DoctorOptions(config=config)
            return [f"{d.grade}: {d.text}" for d in examine(options) if d.subject in ("TSA", "log")]

        tsa, log = diagnosed()
        assert tsa.startswith("good: unix:")
        assert "the INSECURE software quote is of the binary in record 0" in tsa
        assert log.startswith("good: ")
        assert log.endswith("has 1 record, signed by INSECURE.papaya.invalid/one-machine")

        signed = checkpoint.read_bytes()
        other = b"B" if signed[-10:-9] == b"A" else b"A"  # of the signature
        checkpoint.write_bytes(signed[:-10] + other + signed[-9:])
        tsa, log = diagnosed()
        assert tsa.startswith("problem: ")
        assert "the log failed a check" in tsa
        assert log.startswith("problem: ")
        assert "fail a check" in log
        checkpoint.write_bytes(signed)

        entries = installation.data / "log" / "tile" / "entries" / "000.p" / "1"
        entries.write_bytes(entries.read_bytes().replace(b"measure", b"mislead"))
        assert [line.split(":")[0] for line in diagnosed()] == ["problem", "problem"]

        (installation.data / "log.leaf").write_bytes(b"\xff")
        assert "log.leaf is damaged" in diagnosed()[0]
        (installation.data / "log.key.pub").write_bytes(b"\xff")
        assert ["a file is damaged" in line for line in diagnosed()] == [True, True]
        assert server.stop() == 0  # with its TSA
        assert not (installation.data / "tsa.sock").exists()
        assert diagnosed()[0].startswith("good: no `tsa` is set")


def test_a_database_and_a_bucket_that_work(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = tmp_path / "papaya.toml"
    with postgres().schema() as url, s3_server() as s3:
        PostgresState(url, "a server").close()
        config.write_text(
            f"data = 'data'\nstate = '{url}'\nblobs = 's3://{BUCKET}/here'\n"
            f"blobs_endpoint = '{s3.endpoint}'\nblobs_credentials = '{key_file(tmp_path)}'\n"
        )
        graded = {each.subject: each.grade for each in examine(DoctorOptions(config=config))}
    assert (graded["state"], graded["blobs"]) == ("good", "good")
    assert not list((tmp_path / "data").iterdir())


def test_the_address_for_direct_uploads_is_tried(tmp_path: Path) -> None:
    config = tmp_path / "aggregator.toml"
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)

    def grade(url: str, listening: socket.socket | None = None) -> tuple[str, str]:
        config.write_text(
            f'upload_url = "{url}"\ntls_authority = "{made.authority}"\n', encoding="utf-8"
        )
        options = DoctorOptions(role="aggregator", config=config)
        greeter = Thread(target=_shake_hands, args=(listening, context))
        if listening is not None:
            greeter.start()
        [each] = [each for each in examine(options) if each.subject == "upload_url"]
        if listening is not None:
            greeter.join()
        assert each.grade == "good" or each.hint
        return each.grade, each.text

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert grade(f"http://127.0.0.1:{port}")[0] == "good"
        listening.accept()[0].close()
        assert grade(f"https://127.0.0.1:{port}", listening)[0] == "good"
        refused, why = grade(f"https://127.0.0.2:{port}", None)
    assert refused == "warning"
    assert "upload through selectors" in why
    assert "unknown host" in grade("https://nobody.invalid")[1]


def test_upload_routes_are_tried_as_a_selector_passes_connections_on(tmp_path: Path) -> None:
    config = tmp_path / "selector.toml"
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)

    def grade(name: str, target: str) -> tuple[str, str, str]:
        settings = [f'{setting} = "{path}"' for setting, path in made.listeners().items()]
        routes = f'upload_routes = {{ "{name}" = "{target}" }}'
        config.write_text("\n".join([*settings, routes]), encoding="utf-8")
        options = DoctorOptions(role="selector", config=config)
        [each] = [each for each in examine(options) if each.subject == "upload_routes"]
        return each.grade, each.text, each.hint

    def aggregator(expects_proxies: bool) -> tuple[str, str, str]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            greeter = Thread(target=_shake_hands, args=(listening, context, expects_proxies))
            greeter.start()
            found = grade("localhost", f"127.0.0.1:{listening.getsockname()[1]}")
            greeter.join()
            return found

    assert aggregator(expects_proxies=True)[0] == "good"
    refused, _, hint = aggregator(expects_proxies=False)
    assert (refused, "to proxies" in hint) == ("warning", True)
    refused, why, _ = grade("localhost", "nobody.invalid:8750")
    assert (refused, "upload through selectors" in why) == ("warning", True)
    assert grade("*.uploads.example", "*.nobody.invalid:8750")[0] == "good"


def test_a_certificate_without_the_address_of_the_admin_api_is_no_problem(tmp_path: Path) -> None:
    """Devices and owners use its names; doctor uses the address that the server listens on."""
    made = Authority(tmp_path / "tls").issue("server", hosts=["papaya.example"])
    with Installation(tmp_path) as installation:
        installation.add(server=CALM, deployment=made.listeners()).start()
        config = installation.folder / "server.toml"
        [each] = [each for each in found(config) if each.subject == "server"]
        assert (each.grade, "its certificate is for another name" in each.text) == ("warning", True)
        settings = config.read_text(encoding="utf-8").splitlines()
        config.write_text("\n".join(s for s in settings if not s.startswith("tls_authority")))
        [each] = [each for each in found(config) if each.subject == "server"]
        assert (each.grade, each.hint.startswith("set tls_authority")) == ("problem", True)


def _shake_hands(
    listening: socket.socket, context: ssl.SSLContext, expects_proxies: bool = False
) -> None:
    plain, _ = listening.accept()
    if expects_proxies:
        assert plain.recv(len(LOCAL_HEADER), socket.MSG_WAITALL) == LOCAL_HEADER
    # The doctor closes the connection as soon as its side of the handshake is over.
    with plain, suppress(OSError), context.wrap_socket(plain, server_side=True):
        pass
