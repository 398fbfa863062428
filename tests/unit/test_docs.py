"""The documentation says what is so: links resolve, names exist, commands parse, examples run.

Each check reads the pages as they are; what it means by a file, a name or a command is in the
patterns below. A page that is generated must be what its generator makes of the code today.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import pytest

from papaya import __version__
from papaya.attestation.policy import DevicePolicy
from papaya.cli import main as cli
from papaya.config import TaskConfig
from papaya.config.deployment import Deployment
from papaya.config.server import MAX_CHUNK_BYTES, DeviceConfig, ServerConfig
from papaya.device.limits import CheckInPacing, DeviceLimits
from papaya.device.owners import parse_owners
from papaya.device.selectors import MAX_ANSWER_BYTES
from papaya.device.use_policy import parse_policies
from papaya.http.limits import MAX_HEADERS, MAX_TARGET_CHARS, ListenerLimits
from papaya.messages import wire
from papaya.messages.base import PROTOCOL_VERSION
from papaya.messages.participation import (
    MAX_CHUNKS,
    MAX_EXTRA_S,
    AbortReason,
    Chunk,
    DiscardReason,
)
from papaya.messages.selection import Capabilities
from papaya.server.admin.accounts import Identities
from papaya.server.admin.routes import AdminRoutes
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import ChangeReason, Evaluate, Mark, NewTask, Revoke, RollBack
from papaya.server.device_api import MAX_REQUEST_BYTES
from papaya.server.device_openapi import device_document
from tools import configuration_reference, event_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
PROTOCOL = ROOT / "docs" / "spec" / "protocol.md"
ADMIN_API = ROOT / "docs" / "admin-api.md"
FOLDERS = ("papaya", "tests", "tools", "docs", "bench", "examples", "experiments")

# What a page may name without telling how to type it.
NAMED_AS_SUCH = [["task"], ["task", "compile"], ["token"], ["log"], ["tsa"], ["audit"]]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:/[\w.-]+)+|[A-Z]+\.md|Makefile|[\w-]+\.(?:toml|txt)")
NAME_IN_FILE = re.compile(r"((?:`[\w.]+`(?:, | and ))*`[\w.]+`) in `(papaya/[\w/]+\.py)`")
GLOSSARY_ENTRY = re.compile(r"`(papaya/[\w/.]+\.py)`((?:,? `[\w.]+`)*)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    text: str


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def one_line(page: Path) -> str:
    return " ".join(text_of(page).split())


def prose_of(page: Path) -> str:
    """A page without its fenced blocks, with wrapped lines joined so that code spans are whole."""
    return re.sub(r"\n(?!\n|[-|#])", " ", FENCE.sub("", text_of(page)))


def blocks(*languages: str) -> list[Block]:
    found = [
        Block(page, *match.groups()) for page in PAGES for match in FENCE.finditer(text_of(page))
    ]
    return [block for block in found if block.language in languages]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors_of(page: Path) -> list[str]:
    """As they are made from headings: lower case, no punctuation, dashes for spaces."""
    titles = HEADING.findall(FENCE.sub("", text_of(page)))
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def commands() -> Iterator[tuple[Path, str]]:
    """Every `papaya …` and `make …` that a page tells its reader to type."""
    for page in PAGES:
        typed = "".join(b.text for b in blocks("console") if b.page == page)
        lines = typed.replace("\\\n", " ").splitlines()
        for line in [*lines, *CODE.findall(prose_of(page))]:
            words = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
            if words and words[0] in ("papaya", "make") and len(words) > 1:
                yield page, shlex.join(words)


# --- Pages against files


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_resolves(page: Path) -> None:
    for link in LINK.findall(text_of(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors_of(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = [code for code in CODE.findall(prose_of(page)) if FILE.fullmatch(code)]
    assert [code for code in named if not (ROOT / code).exists()] == []


def test_the_pattern_for_files_finds_files() -> None:
    """The check above would pass on any page if it did not."""
    for code in ("papaya/machine.py", "tests/paper", "docs/adr", "README.md", "pyproject.toml"):
        assert FILE.fullmatch(code), code
    for code in ("papaya swarm", "papaya", "task/…", "fence/next-word", "TaskConfig.warnings()"):
        assert not FILE.fullmatch(code), code


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for link in LINK.findall(text_of(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target in PAGES and target not in reached:
                reached.add(target)
                todo.append(target)
    assert [name_of(page) for page in PAGES if page not in reached] == []


# --- Pages against code


def test_the_list_of_events_is_that_of_the_code() -> None:
    page = text_of(event_reference.PAGE)
    assert page == event_reference.rendered(page), "run python -m tools.event_reference"
    for kind in event_reference.all_events():
        assert set(kind.identity) & {*kind.__struct_fields__, "task", "peer"}, kind


def test_the_configuration_page_is_what_the_code_says() -> None:
    hint = "run python -m tools.configuration_reference"
    assert text_of(configuration_reference.PAGE) == configuration_reference.page(), hint


def names_in(file: str) -> set[str]:
    """Top-level names of a module; attributes, fields and methods as Class.name, also inherited."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    members: dict[str, set[str]] = {}
    names: set[str] = set()
    for node in tree.body:
        names |= bound_by(node)
        if isinstance(node, ast.ClassDef):
            own = {name for child in node.body for name in bound_by(child)}
            own |= {
                target.attr
                for child in ast.walk(node)
                for target in assigned_by(child)
                if isinstance(target, ast.Attribute)
            }
            for base in node.bases:
                own |= members.get(getattr(base, "id", ""), set())
            members[node.name] = own
            names |= {f"{node.name}.{name}" for name in own}
    return names


def assigned_by(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            return targets
        case ast.AnnAssign(target=target):
            return [target]
    return []


def bound_by(node: ast.AST) -> set[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return {name}
        case ast.Assign() | ast.AnnAssign():
            return {target.id for target in assigned_by(node) if isinstance(target, ast.Name)}
    return set()


def test_every_name_in_the_glossary_is_in_the_file_it_names() -> None:
    page = text_of(ROOT / "docs" / "glossary.md")
    entries = GLOSSARY_ENTRY.findall(page)
    assert len(entries) > 50, "the pattern no longer finds the entries"
    for file, names in entries:
        for name in CODE.findall(names):
            assert name in names_in(file), f"{file} has no {name}"


def test_every_name_that_is_said_to_be_in_a_file_is_there() -> None:
    """As in: `load` in `papaya/aggregator/held_task.py`. A method may stand without its class."""
    found = [match for page in PAGES for match in NAME_IN_FILE.findall(prose_of(page))]
    assert len(found) > 5, "the pattern no longer finds any"
    for names, file in found:
        known = names_in(file)
        known |= {name.rpartition(".")[2] for name in known}
        assert [name for name in CODE.findall(names) if name not in known] == [], file


@pytest.mark.parametrize(
    "noun",
    """Coordinator, Selector, Aggregator, Client Runtime, FL task, client demand, concurrency,
    aggregation goal, staleness, maximum staleness, over-selection, virtual session, selection,
    participation, report, upload in chunks, assignment map, sequence number, recovery period,
    leader election, persistent aggregator, estimated workload, intermediate aggregate,
    model version, server optimizer, participation history, trip, utilization, round, heartbeat,
    acceptance, rejection, active client, Trusted Secure Aggregator, remote attestation,
    verifiable log, fixed point conversion, Example Store, Executor, differential privacy"""
    .replace("\n    ", " ").split(", "),
)  # fmt: skip
def test_the_glossary_has_the_papers_noun(noun: str) -> None:
    first_cells = re.findall(
        r"^\| ([^|]+) \|", text_of(ROOT / "docs" / "glossary.md"), re.MULTILINE
    )
    assert any(noun in cell for cell in first_cells)


def test_the_changelog_knows_this_version() -> None:
    heading = "Unreleased" if ".dev" in __version__ else __version__
    assert f"## [{heading}]" in text_of(ROOT / "CHANGELOG.md")


def test_the_readme_is_the_packages_description() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["readme"] == "README.md"


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_has_its_three_parts_and_is_listed(page: Path) -> None:
    title, *parts = HEADING.findall(text_of(page))
    assert title.startswith(f"{page.name[:4]}: ")
    assert parts == ["Context", "Decision", "Consequences"]
    assert f"({page.name})" in text_of(page.parent / "README.md")


# --- Commands and examples


def test_every_command_can_be_typed() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", text_of(ROOT / "Makefile"), re.MULTILINE)
    found = list(commands())
    assert len(found) > 20, "the pattern no longer finds the commands"
    for page, command in found:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert arguments[0] in targets, f"{name_of(page)}: {command}"
        elif arguments in NAMED_AS_SUCH:
            with pytest.raises(SystemExit, match="0"):
                cli.parser_for((arguments[0],)).parse_args([*arguments, "--help"])
        else:
            cli.parser_for((arguments[0],)).parse_args(arguments)


# A block that is a whole file of examples is tested where that file is.
EXAMPLES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))]
SNIPPETS = [block for block in blocks("python") if block.text not in EXAMPLES]


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: name_of(block.page))
def test_every_example_runs(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block.text, name_of(block.page), "exec"), {"__name__": "__example__"})
    assert capsys.readouterr().out.strip()


def test_the_page_about_tasks_shows_a_whole_task_file() -> None:
    """`tests/unit/test_examples.py` trains it."""
    page = ROOT / "docs" / "train-your-own-model.md"
    example = text_of(ROOT / "examples" / "opened.py")
    assert example in [block.text for block in blocks("python") if block.page == page]


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: name_of(block.page))
def test_every_file_of_settings_is_accepted(block: Block) -> None:
    if "log_key" in block.text:
        msgspec.toml.decode(block.text, type=DevicePolicy)
    elif "[collections." in block.text:
        assert parse_policies(block.text.encode(), name_of(block.page))
    elif "[owners." in block.text:
        assert parse_owners(block.text.encode(), name_of(block.page))
    else:
        msgspec.convert(tomllib.loads(block.text), Deployment)


def test_the_readme_has_one_example_of_twenty_lines() -> None:
    [example] = [block for block in blocks("python") if block.page == ROOT / "README.md"]
    assert len(example.text.splitlines()) <= 22


def test_every_block_says_its_language_or_is_a_picture() -> None:
    languages = {match.group(1) for page in PAGES for match in FENCE.finditer(text_of(page))}
    assert languages <= {"", "console", "json", "python", "sh", "toml", "yaml"}


# --- The device protocol and the admin API against the code


def fields_on_the_page(heading: str) -> set[str]:
    """The first column of the first table under this heading; none where there is no table."""
    [section] = re.findall(
        rf"^### `{heading}`\n(.*?)(?=^##|\Z)", text_of(PROTOCOL), re.MULTILINE | re.DOTALL
    )
    table = re.search(r"^\| field .*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    return set() if table is None else set(re.findall(r"^\| `(\w+)`", table[0], re.MULTILINE))


# A chunk is no JSON: its fields are in the path, in headers and in the body.
MESSAGES = [
    kind
    for kind in (*get_args(wire.FromDevice), *get_args(wire.ToDevice), Capabilities)
    if kind is not Chunk
]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_protocols_page_has_every_field_of_every_message(kind: type[msgspec.Struct]) -> None:
    assert fields_on_the_page(kind.__name__) == set(kind.__struct_fields__)


def test_the_protocols_page_has_every_path_and_every_reason() -> None:
    page = text_of(PROTOCOL)
    by_key = ("/parameters/", "/urls/")
    paths = [path for path in device_document()["paths"] if not any(k in path for k in by_key)]
    assert len(paths) > 5
    paths += [f"/v1{part}{{key}}" for part in by_key]
    assert [path for path in paths if path not in page] == []
    reasons = {*get_args(AbortReason), *get_args(DiscardReason)}
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in page] == []
    assert f"This is protocol version {PROTOCOL_VERSION}." in page


def test_the_protocols_page_has_the_limits_of_the_code() -> None:
    page, limits = text_of(PROTOCOL), ListenerLimits()
    assert f"| body of a POST | {MAX_REQUEST_BYTES:,} bytes |" in page
    assert f"| body of a PUT | {MAX_CHUNK_BYTES:,} bytes |" in page
    head = f"{limits.max_head_bytes:,} bytes, {MAX_HEADERS} headers"
    assert f"| {head}, path of {MAX_TARGET_CHARS:,} characters |" in page
    assert f"| time for a head | {limits.head_timeout_s:g} s |" in page
    assert f"no pause of more than {limits.body_timeout_s:g} s" in page
    assert f"at least {limits.min_body_bytes_per_s:,.0f} bytes/s" in page
    least = f"at least {limits.min_answer_bytes_per_s:,.0f} bytes/s"
    assert f"after the first {limits.write_timeout_s:g} s {least}" in page
    assert f"and no pause of more than {limits.answer_pause_s:g} s |" in page
    assert f"closed after {limits.idle_timeout_s:g} s |" in page
    assert f"There are at most {MAX_CHUNKS:,}." in page


def test_the_protocols_page_has_the_limits_of_the_reference_client() -> None:
    page, limits = one_line(PROTOCOL), DeviceLimits()
    for phrase in (
        f"trains for at most {limits.max_training_s:g} s",
        f"heartbeats {limits.min_heartbeat_s:g} s to {limits.max_heartbeat_s:g} s apart",
        f"takes at most {in_units(limits.max_model_bytes)}",
        f"uploads for at most {limits.max_upload_s:g} s",
        f"never waits more than {limits.max_retry_after_s:g} s because of a `Retry`",
        f"or {in_words(limits.max_rejected_s)} because of a `Rejected`",
        f"`keep_s` moves its deadlines by at most {MAX_EXTRA_S:g} s per visit",
        f"The server does this for at most {MAX_EXTRA_S:g} s per session",
        f"is {in_words(limits.max_exclusion_s)} ago (the reference client's `max_exclusion_s`)",
        f"lists the task for another {in_words(limits.max_exclusion_s)}",
        f"| answer | up to {in_units(MAX_ANSWER_BYTES)};",
        f"the default is {in_words(DeviceConfig().participation_floor_s)}.",
    ):
        assert phrase in page, phrase


def test_the_protocols_page_has_the_back_off_of_the_reference_client() -> None:
    page, config, pacing = one_line(PROTOCOL), DeviceConfig(), CheckInPacing()
    answer_s, first_s, most_s = config.request_timeout_s, config.backoff_s, config.max_backoff_s
    visit_s, pause_s = pacing.backoff_s, pacing.pause_s
    for phrase in (
        f"no answer after {answer_s:g} s ({config.check_in_timeout_s:g} s for a check-in)",
        f"no answer comes within {answer_s:g} s of sending the request",
        f"no valid answer comes within {answer_s:g} s",
        f"from 0 to min({most_s:g} s, {first_s:g} s × 2ⁿ)",
        f"at most {2 * first_s:g} s before the first, {4 * first_s:g} s before the second",
        f"sends the next one after a time drawn uniformly from 0 to {most_s:g} s",
        f"gives up a check-in or a join after {config.give_up_s:g} s",
        f"pauses for {0.5 * pause_s:g} s to {1.5 * pause_s:g} s, drawn uniformly",
        f"*b* = min({pacing.max_backoff_s:g} s, {visit_s:g} s × 2ᵐ⁻¹)",
        f"{visit_s / 2:g} s to {visit_s:g} s after the first",
    ):
        assert phrase in page, phrase


def test_the_protocols_page_has_the_waiting_times_of_a_server() -> None:
    page, server = one_line(PROTOCOL), ServerConfig()
    for phrase in (
        f"its `hold_s`, {server.hold_s:g} s by default",
        f"Wait for at least {DeviceConfig().check_in_timeout_s:g} s.",
        f"within three heartbeats of the server, {3 * server.heartbeat_s:g} s by default",
        f"within about a heartbeat, {server.heartbeat_s:g} s by default",
    ):
        assert phrase in page, phrase


def in_words(seconds: float) -> str:
    known = {3600.0: "one hour", 86400.0: "a day"}
    return known.get(seconds) or f"{seconds / 86400:g} days"


def in_units(size: int) -> str:
    return f"{size >> 30} GiB" if size >= 1 << 30 else f"{size >> 10} KiB"


def test_every_message_in_the_protocols_conversation_is_one() -> None:
    lines = [line for b in blocks("json") if b.page == PROTOCOL for line in b.text.splitlines()]
    assert len(lines) > 8
    kinds = {kind.__name__: kind for kind in MESSAGES}
    for line in lines:
        message = msgspec.json.decode(line, type=dict[str, object])
        kind = kinds[str(message.pop("type"))]
        assert set(message) == set(kind.__struct_fields__), line
        # Bounds, base64 and types, as the parser checks them.
        wire.to_device.parse(msgspec.json.encode({"type": kind.__name__, **message}))


def test_the_admin_page_has_every_route() -> None:
    page = re.sub(r"`, `/", "`, `POST /admin/tasks/{task}/", text_of(ADMIN_API))
    routes = AdminRoutes(
        AdminService.__new__(AdminService), Identities.__new__(Identities)
    ).routes()
    assert len(routes) > 10
    for route in routes:
        assert re.search(rf"`{route.method} {re.escape(route.path)}[`?]", page), route


def test_every_body_in_the_admin_page_is_accepted() -> None:
    kinds = {
        "pause": ChangeReason,
        "resume": ChangeReason,
        "cancel": ChangeReason,
        "delete": ChangeReason,
        "rollback": RollBack,
    }
    kinds |= {"mark": Mark, "evaluate": Evaluate, "tasks": NewTask, "revocations": Revoke}
    scripts = "".join(block.text for block in blocks("sh") if block.page == ADMIN_API)
    found = re.findall(r"/(\w+) -d '(.*?)'$", scripts, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in found} == set(kinds)
    for name, body in found:
        parsed = msgspec.json.decode(body, type=kinds[name])
        assert not isinstance(parsed, NewTask) or isinstance(parsed.config, TaskConfig)
