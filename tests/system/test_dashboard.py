"""The dashboard in a real browser: a person signs in, watches a task train, and pauses it.

Debian's chromium through Playwright. `.ci/run` installs it where it may.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from papaya.learning.evaluation import evaluation_vector
from tests.system.admin import Admin
from tests.system.fleet import briefly, fleet
from tests.system.processes import CALM, Installation

_STEP_MS = 120_000
_SCRIPT = "<img src=x onerror=\"document.title='owned'\">"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# Every expectation waits for what is meant, on a busy machine too.
expect.set_options(timeout=_STEP_MS)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium (`.ci/run` does it as root)"
)


class Site:
    """A running server with one trained task, and its dashboard in a browser."""

    def __init__(self, installation: Installation, page: Page) -> None:
        self.server = installation.servers[0]
        self.token = installation.secret("admin.token")
        self.admin = Admin(self.server.addresses["admin"], self.token)
        self.page = page
        self.requests: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))

    @property
    def address(self) -> str:
        return f"http://{self.server.addresses['admin']}"

    def sign_in(self, token: str = "") -> None:
        self.page.goto(self.address)
        self.page.get_by_label("Token").fill(token or self.token)
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("heading", name="Tasks")).to_be_visible()

    def open_task(self, name: str) -> None:
        self.page.get_by_role("link", name=name, exact=True).click()
        expect(self.page.get_by_role("heading", name=name, exact=True)).to_be_visible()


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("dashboard")) as installation:
        server = installation.add(server=CALM).start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(_config("digits"))
        asyncio.run(_train(installation, admin))
        yield installation


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=_STEP_MS)
        yield browser
        browser.close()


@pytest.fixture
def site(installation: Installation, browser: Any) -> Iterator[Site]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(_STEP_MS)
    site = Site(installation, context.new_page())
    errors: list[str] = []
    site.page.on("pageerror", lambda error: errors.append(str(error)))
    yield site
    context.close()
    assert not errors


def _config(task: str) -> TaskConfig:
    return TaskConfig(
        task=task,
        concurrency=8,
        model_length=48,
        regime=AsyncFL(aggregation_goal=4),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        participation_gap_s=0.0,
        commit_interval_s=0.02,
    )


async def _train(installation: Installation, admin: Admin) -> None:
    async with fleet(
        installation.folder / "devices",
        [f"http://{installation.servers[0].addresses['devices']}"],
        installation.secret("device.token"),
        12,
        briefly,
        evaluation=lambda _: evaluation_vector(10, 2.5, 8).tobytes(),
    ) as flying:
        await asyncio.to_thread(
            admin.until_task, "digits", lambda line: line["version"] >= 5, _STEP_MS / 1000
        )
        request = {"clients": 3, "timeout_s": 2 * _STEP_MS / 1000}
        await asyncio.to_thread(admin.post, "/admin/tasks/digits/evaluate", request)
        await asyncio.to_thread(
            admin.until_task, "digits", lambda line: line["loss"] is not None, _STEP_MS / 1000
        )
        await flying.go_home(_STEP_MS / 1000)


def test_a_person_sees_what_runs_and_how_it_learns(site: Site) -> None:
    site.sign_in()
    page = site.page
    row = page.get_by_role("row", name=re.compile("^digits "))
    expect(row).to_contain_text("running")
    expect(row).to_contain_text("AsyncFL")
    expect(page.get_by_text("this server leads")).to_be_visible()
    site.open_task("digits")
    loss = page.get_by_role("img", name=re.compile("^Loss: loss is 0.3125 at version"))
    expect(loss).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Staleness: "))).to_be_visible()
    expect(page.get_by_text("Every client's update, in the clear.")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^all 3 24 0.3125"))).to_be_visible()
    if folder := os.environ.get("PAPAYA_SCREENSHOTS"):  # those of the documentation
        page.screenshot(path=Path(folder, "dashboard-task.png"), full_page=True)
    newest = site.admin.task("digits")["version"]
    expect(page.get_by_role("row", name=re.compile(rf"^{newest} "))).to_be_visible()


def test_a_person_sees_why_and_how_devices_take_part(site: Site) -> None:
    site.sign_in()
    page = site.page
    line = page.get_by_role("row", name=re.compile("task placed coordinator, task digits,"))
    expect(line.first).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("leadership gained")).first).to_be_visible()
    if folder := os.environ.get("PAPAYA_SCREENSHOTS"):
        page.screenshot(path=Path(folder, "dashboard-fleet.png"), full_page=True)
    site.open_task("digits")
    expect(page.get_by_role("row", name=re.compile("^counted [0-9]+ "))).to_be_visible()
    page.get_by_text("One participation, step by step").click()
    expect(page.get_by_text(re.compile("at most C = 8 slots"))).to_be_visible()
    expect(page.get_by_text(re.compile("Every K = 4 updates make a version"))).to_be_visible()
    expect(page.get_by_role("heading", name="Client demand")).to_be_visible()


@pytest.mark.parametrize(
    ("role", "prefix", "may"),
    [("viewer", (), False), ("owner", ("other-",), False), ("owner", ("dig",), True)],
)
def test_actions_are_offered_by_role(
    site: Site, role: str, prefix: tuple[str, ...], may: bool
) -> None:
    name = f"{role}-{len(prefix)}-{may}".lower()
    added = site.admin.post(
        "/admin/accounts", {"name": name, "role": role, "prefixes": list(prefix)}
    )
    site.sign_in(added["token"])
    expect(site.page.get_by_text(f"{name}, {role}", exact=True)).to_be_visible()
    site.open_task("digits")
    expect(site.page.get_by_role("button", name="Cancel")).to_have_count(1 if may else 0)
    if not may:
        expect(site.page.get_by_text("you cannot change this task")).to_be_visible()
        # The server refuses it too, whatever a page shows.
        status = site.page.evaluate(
            """async (token) => (await fetch("/admin/tasks/digits/cancel", {method: "POST",
              body: "{}", headers: {Authorization: `Bearer ${token}`}})).status""",
            added["token"],
        )
        assert status == 403


def test_pause_and_resume_with_a_reason_by_keyboard(site: Site) -> None:
    site.sign_in()
    site.open_task("digits")
    page = site.page
    page.get_by_role("button", name="Pause").press("Enter")
    page.get_by_label("Reason").fill(f"a look {_SCRIPT}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    line = site.admin.task("digits")
    assert (line["state"], line["why"]) == ("paused", f"a look {_SCRIPT}")
    # The reason is text, whatever it contains.
    expect(page.locator("main").get_by_text(_SCRIPT).first).to_be_visible()
    assert page.locator("main img").count() == 0
    assert page.title() == "Papaya"
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    # An answer that was on its way before may make it change twice.
    expect(page.get_by_role("row", name=re.compile("digits is running")).first).to_be_visible()


def test_an_action_that_is_refused_says_why(site: Site) -> None:
    site.sign_in()
    site.open_task("digits")
    site.page.get_by_role("button", name="Roll back").click()
    site.page.get_by_label("To version").fill("999999")
    site.page.keyboard.press("Enter")
    alert = site.page.get_by_role("alert")
    expect(alert).to_contain_text("999999")


def test_a_wrong_token_is_refused_and_no_token_is_in_any_address(site: Site) -> None:
    page = site.page
    page.goto(f"{site.address}/dashboard/")
    page.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("refused this token")
    site.sign_in()
    assert site.requests
    assert all(url.startswith(site.address) for url in site.requests)
    assert not any(site.token in url for url in site.requests)
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_people_with_a_screen_reader_a_phone_or_a_dark_screen(
    site: Site, scheme: Any, width: int
) -> None:
    page = site.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{site.address}/dashboard/")
    assert _axe(page) == []
    site.sign_in()
    assert _axe(page) == []
    site.open_task("digits")
    expect(page.get_by_role("img", name=re.compile("^Loss: "))).to_be_visible()
    assert _axe(page) == []
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0, "the page scrolls sideways"


def test_the_content_security_policy_stops_a_planted_script(site: Site) -> None:
    """Planted: what an injection would do if the page ever parsed text as HTML."""
    site.sign_in()
    outcome = site.page.evaluate(
        """() => new Promise((resolve) => {
          addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
          const script = document.createElement("script");
          try { script.textContent = "document.title = 'owned'"; document.head.append(script); }
          catch (error) { resolve(String(error)); }
        })"""
    )
    assert re.search("script-src|TrustedScript|require-trusted-types", outcome)
    assert site.page.title() == "Papaya"


def test_ten_thousand_versions_and_two_hundred_tasks_stay_responsive(site: Site) -> None:
    """Answers of that size, in place of the server's: a chart draws a few hundred of the points."""
    page = site.page
    task = site.admin.get("/admin/tasks/digits")
    status = site.admin.get("/admin/status")
    status["tasks"] = [task["task"] | {"task": f"t{i}"} for i in range(200)]
    points = [task["points"][-1] | {"version": i, "loss": 1 / (1 + i)} for i in range(10_000)]
    page.route("**/admin/status", lambda route: route.fulfill(json=status))
    page.route("**/admin/tasks/t7", lambda route: route.fulfill(json=task))
    page.route("**/points*", lambda route: route.fulfill(json=points))
    site.sign_in()
    expect(page.get_by_role("link", name=re.compile(r"^t\d+$"))).to_have_count(200)
    page.get_by_role("link", name="t7", exact=True).click()
    expect(page.get_by_role("img", name=re.compile("^Loss: "))).to_be_visible()
    assert len(page.locator("svg path.line").first.get_attribute("d") or "") < 20_000


def test_a_person_sees_a_rollout_and_what_protects_a_secure_private_task(site: Site) -> None:
    """Answers of a secure and private task in a rollout, in place of the server's."""
    page = site.page
    task, status = site.admin.get("/admin/tasks/digits"), site.admin.get("/admin/status")
    task["config"] |= {
        "secure_aggregation": {"threshold": 4},
        "privacy": {"noise_multiplier": 1.5, "clip": 2.0, "script": _SCRIPT},
    }
    task["rollout"] = {
        "revision": 2,
        "state": "running",
        "share": 0.1,
        "plan": {"metric": "accuracy", "evaluations": 2, "updates": 20},
        "since": 1.0,
        "why": _SCRIPT,
        "baseline": 0.8,
        "baseline_version": 3,
        "values": [[4, 0.79]],
        "good": 1,
        "counts": {"counted": 9, "failed": 1, "others_counted": 40, "others_failed": 0},
    }
    root = "ab" * 32
    status["evidence"] = {"platform": "sgx", "origin": "example.org/log", "size": 7, "root": root}
    page.route("**/admin/status", lambda route: route.fulfill(json=status))
    page.route("**/admin/tasks/digits", lambda route: route.fulfill(json=task))
    site.sign_in()
    site.open_task("digits")
    for text in (
        "Only sums of at least 4 updates",
        "SGX",
        "example.org/log, 7 records, root abababababababab…",
        "noise_multiplier 1.5",
        "2 is given to 10 % of the devices",
        "accuracy 0.8 at version 3",
        "accuracy 0.79 at version 4",
        "10.0 % of 10, others 0.0 % of 40",
        "1 of 2",
    ):
        expect(page.get_by_text(text).first).to_be_visible()
    assert _axe(page) == []
    assert page.title() == "Papaya"


def test_a_failover_before_the_last_restart_is_on_the_time_line(
    site: Site, installation: Installation
) -> None:
    # A killed process may lose its last two seconds of events.
    assert site.server.stop() == 0
    site.server.start()
    site.sign_in()
    for text in ("coordinator, epoch 2, ", "aggregator, boot 2"):
        expect(site.page.get_by_text(text).first).to_be_visible()
    # In one call: rows move down while new ones are added.
    rows = [text.split("\t") for text in site.page.get_by_role("row").all_inner_texts()]
    told = [
        (event.lstrip("▲✕ "), details) for _, event, details in (r for r in rows if len(r) == 3)
    ]
    gained = [details for event, details in told if event == "leadership gained"]
    # On a busy machine a leader may renew its lease late, and goes on in the same epoch.
    elected = [text for text in gained if "its lease was renewed late" not in text]
    assert [text.split(", ")[:2] for text in elected] == [
        ["coordinator", "epoch 2"],
        ["coordinator", "epoch 1"],
    ]
    assert ("node started", "aggregator, boot 2") in told
    moves = [details for event, details in told if event in ("task placed", "task moved")]
    assert any("task digits" in text and "seq 1" in text for text in moves), "before the restart"


def _axe(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found]
