"""The console in headless Chromium, on a stack that trains. `make ui` runs these tests; they need Chromium.

TINSMITH_SCREENSHOTS=FOLDER also writes pictures of each page there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import tinker
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from app.settings import hash_key
from tests.contract.data import ADAM, policy, supervised, train
from tests.contract.stack import API_KEY, BASE, Stack, running
from tests.models import tiny_qwen3
from tests.servers import free_port

SIZES = {"laptop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
CHROMIUM = os.environ.get("TINSMITH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
expect.set_options(timeout=120_000)  # a machine that stands still for five seconds fails no test
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    base = tiny_qwen3(tmp_path_factory.mktemp("base"))
    data = tmp_path_factory.mktemp("stack") / "data"
    # A trainer that stands still keeps its models while a page is read.
    settings = f'operator_keys = ["{hash_key(API_KEY)}"]\n[engine]\nlease_s = 60\n'
    with running(Stack(data, base, free_port(), extra=settings)) as stack:
        yield stack


@pytest.fixture(scope="module")
def training(stack: Stack) -> Iterator[tinker.TrainingClient]:
    """A run with 20 steps, two steps of a policy, a metric of its client and a checkpoint; another one beside it."""
    with stack.client() as service:
        other = service.create_lora_training_client(base_model=BASE, rank=4, seed=1).result()
        train(other, 12, supervised(seed=5))
        client = service.create_lora_training_client(base_model=BASE, rank=8, seed=2).result()
        train(client, 20)
        for _ in range(2):
            client.forward_backward(policy(), "importance_sampling").result()
            client.optim_step(ADAM).result()
        run = client.get_info().model_id
        client.get_telemetry().log("metrics", {"model_id": run, "step": 22, "metrics": {"reward": 0.75}})
        client.save_state("first").result()
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "no Chromium here: install it (on Debian: apt install chromium), or set TINSMITH_CHROMIUM"
    with sync_playwright() as playwright:
        # The sandbox starts neither for root, nor where AppArmor forbids it, as on GitHub's ubuntu-24.04. Playwright's
        # default is the same.
        yield playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)


Opener = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, stack: Stack, training: tinker.TrainingClient) -> Iterator[Opener]:
    """Opens a page of a new browser, which has logged in. At the end nothing was wrong in its log, and nothing came
    from elsewhere."""
    wrong: list[str] = []

    def open_(size: str = "laptop", scheme: str = "light", *, logged_in: bool = True) -> Page:
        width, height = SIZES[size]
        page = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            base_url=stack.url,
        ).new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(stack.url) else wrong.append(asked.url))
        page.goto("/console/login")
        if logged_in:
            log_in(page)
        return page

    yield open_
    for context in browser.contexts:
        context.close()
    assert wrong == []


def log_in(page: Page) -> None:
    page.get_by_label("API key").fill(API_KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def newest_run(page: Page) -> Page:
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", name="Curves")).to_be_visible()
    return page


@contextlib.contextmanager
def stopped_trainer(stack: Stack) -> Iterator[None]:
    """The trainer stands still, so that calls wait. It goes on before its lease ends."""
    assert stack.process is not None
    children = psutil.Process(stack.process.pid).children(recursive=True)
    trainer = [child for child in children if "trainer-" in " ".join(child.cmdline())]
    assert trainer
    for process in trainer:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in trainer:
            process.send_signal(signal.SIGCONT)


def scroll(table: Locator) -> int:
    """Scrolls the table to its right end; returns how far that is."""
    return int(table.evaluate("it => (it.scrollLeft = it.scrollWidth, it.scrollLeft)"))


def scrolled(table: Locator) -> int:
    return int(table.evaluate("it => it.scrollLeft"))


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id"))


def await_reload(table: Locator) -> None:
    """Waits until the content of the table is a later one."""
    table.evaluate("it => { it.firstElementChild.id = 'before' }")
    expect(table.page.locator("#before")).to_have_count(0)


def steps(page: Page) -> int:
    return int(page.locator("dt", has_text="Steps").locator("xpath=../dd").inner_text())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_accessible_and_fits_the_screen(opened: Opener, size: str, scheme: str) -> None:
    page = opened(size, scheme, logged_in=False)
    _check(page, "login", size, scheme)
    log_in(page)
    _check(page, "runs", size, scheme)
    _check(newest_run(page), "run", size, scheme)
    page.get_by_role("link", name="Changes to this run").click()
    expect(page.get_by_role("region")).to_contain_text("checkpoint save")
    _check(page, "run-events", size, scheme)
    page.get_by_role("link", name="Compare", exact=True).click()
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".legend li")).to_have_count(2)
    _check(page, "compare", size, scheme)
    for name in ("Checkpoints", "Queue", "Account"):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        _check(page, name.lower(), size, scheme)
    page.get_by_role("link", name="Usage and storage").click()
    _check(page, "usage", size, scheme)
    page.go_back()
    page.get_by_role("link", name="Changes to projects").click()
    _check(page, "events", size, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_an_operator_makes_a_project_with_a_member_a_key_and_limits(opened: Opener, size: str, scheme: str) -> None:
    page, name = opened(size, scheme), f"kettles {size} {scheme}"
    page.get_by_role("link", name="Account", exact=True).click()
    page.get_by_role("link", name="Members, keys and limits").click()
    page.get_by_label("Name of the organisation").fill("Tinkers")
    page.get_by_role("button", name="Create the organisation").click()
    page.get_by_label("Name of the project").fill(name)
    _check(page, "projects", size, scheme)
    page.get_by_role("button", name="Create the project").click()
    page.get_by_label("Email of a user").fill("jo@example.org")
    page.get_by_role("button", name="Add a member").click()
    page.get_by_label("Name of the key").fill("laptop")
    page.get_by_label("Days until it expires").fill("90")
    page.get_by_role("button", name="Create a key").click()
    expect(page.locator("#key")).to_contain_text("tml-")
    _check(page, "new-key", size, scheme)
    page.get_by_role("link", name="Back to the project").click()
    expect(page.get_by_role("region", name="Keys")).to_contain_text("laptop")
    page.get_by_role("button", name="Make jo@example.org an admin").click()
    page.get_by_label("keep checkpoints").fill("3")
    page.get_by_role("button", name="Set the limits").click()
    expect(page.get_by_role("heading", name="Delete old checkpoints?")).to_be_visible()
    _check(page, "confirm", size, scheme)
    page.get_by_role("button", name="Set the limits").click()
    expect(page.get_by_label("keep checkpoints")).to_have_value("3")
    _check(page, "project", size, scheme)
    page.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("No key yet.")).to_be_visible()


def test_curves_grow_while_the_run_trains(opened: Opener, training: tinker.TrainingClient) -> None:
    page = newest_run(opened())
    before, drawn = steps(page), page.locator("svg path").first.get_attribute("d")
    train(training, 3)
    expect(page.locator("dt", has_text="Steps").locator("xpath=../dd")).to_have_text(str(before + 3))
    assert page.locator("svg path").first.get_attribute("d") != drawn


def test_the_keyboard_alone_reaches_a_run_and_keeps_its_place_when_the_table_is_loaded_again(
    opened: Opener, training: tinker.TrainingClient
) -> None:
    page, place = opened("phone"), f"run-{training.get_info().model_id}"
    for _ in range(20):
        page.keyboard.press("Tab")
        if focused(page) == place:
            break
    table = page.get_by_role("region", name="Runs")
    assert (far := scroll(table)) > 0
    await_reload(table)
    assert (focused(page), scrolled(table)) == (place, far)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Curves")).to_be_visible()


def test_a_table_on_a_phone_stays_scrolled_when_it_is_loaded_again(opened: Opener) -> None:
    page = opened("phone")
    page.locator("#runs").focus()
    page.evaluate("document.activeElement.scrollLeft = 60")
    await_reload(page.locator("#runs"))
    assert page.evaluate("[document.activeElement.id, document.activeElement.scrollLeft]") == ["runs", 60]


def test_waiting_calls_are_shown_with_their_position_and_reason(
    opened: Opener, stack: Stack, training: tinker.TrainingClient
) -> None:
    page = opened("phone")
    with stopped_trainer(stack):
        asked = [training.forward(supervised(), "cross_entropy") for _ in range(6)]
        page.get_by_role("link", name="Queue", exact=True).click()
        calls, workers = (page.get_by_role("region", name=name) for name in ("Your waiting calls", "Workers"))
        expect(calls.locator("tbody tr")).to_have_count(6)
        assert calls.locator("td:nth-child(4)").all_inner_texts() == ["1", "2", "3", "4", "5", "6"]
        reasons = calls.locator("td:last-child").all_inner_texts()
        assert reasons[0] == "it runs now, or starts next"
        assert reasons[1].startswith("1 call runs before it") and reasons[5].startswith("about 5 calls run before it")
        link = workers.get_by_role("link").last
        link.focus()
        before = (focused(page), scroll(calls), scroll(workers))
        assert before[0] and before[1] > 0 and before[2] > 0
        await_reload(workers)
        assert (focused(page), scrolled(calls), scrolled(workers)) == before
        _check(page, "waiting", "phone", "light")
        page.emulate_media(color_scheme="dark")
        _check(page, "waiting", "phone", "dark")
    assert len([call.result() for call in asked]) == 6
    expect(page.get_by_text("No call waits.")).to_be_visible()


def test_values_of_a_policy_and_of_the_client_have_their_curves(opened: Opener) -> None:
    page = newest_run(opened())
    kl, reward = (page.get_by_label(f"{name}: ") for name in ("kl:sum", "client/reward"))
    expect(kl).to_have_attribute("aria-label", re.compile(" at step 21 to .+ at step 22$"))
    # The SDK sends a client's values every ten seconds.
    expect(reward).to_have_attribute("aria-label", re.compile(" to 0.75 at step 22$"))


def test_a_checkpoint_is_published_expires_is_downloaded_and_deleted_with_a_second_press(
    opened: Opener, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    path = training.save_state("mine").result().path
    page = newest_run(opened())
    page.get_by_role("button", name=f"Publish: {path}").click()
    expect(page.get_by_role("button", name=f"Make private: {path}")).to_be_visible()
    page.get_by_role("button", name=f"Expire in 7 days: {path}").click()
    page.get_by_role("button", name=f"Keep for ever: {path}").click()
    expect(page.get_by_role("button", name=f"Expire in 7 days: {path}")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name=f"Download: {path}").click()
    download.value.save_as(tmp_path / "mine.tar")
    with tarfile.open(tmp_path / "mine.tar") as archive:
        assert any(name.endswith(".safetensors") for name in archive.getnames())
    page.get_by_role("button", name=f"Delete …: {path}").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="Checkpoints")).to_be_visible()
    expect(page.get_by_text(path)).to_have_count(0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_an_adapter_is_sampled_beside_its_base_model(
    opened: Opener, training: tinker.TrainingClient, size: str, scheme: str
) -> None:
    path = training.save_weights_for_sampler(f"{size}-{scheme}").result().path
    page = opened(size, scheme)
    page.get_by_role("link", name="Checkpoints", exact=True).click()
    page.get_by_role("link", name=f"Sample: {path}").click()
    page.get_by_label("Beside it").select_option(BASE)
    page.get_by_label("Message", exact=True).fill("How do I sleep better?")
    page.get_by_label("Length in tokens").fill("24")
    page.get_by_role("button", name="Sample").click()
    expect(page.locator(".answer.tokens")).to_have_count(2)
    expect(page.locator(".answer.tokens").first).to_be_in_viewport()
    tokens = page.locator(".answer.tokens span")
    assert tokens.count() > 2
    unlikely = page.locator(".answer.tokens .shade0").first
    assert unlikely.evaluate("it => getComputedStyle(it).backgroundColor") != "rgba(0, 0, 0, 0)"
    for summary in page.locator("summary").all():
        summary.click()
    expect(page.locator("details tbody tr:visible")).to_have_count(tokens.count())
    _check(page, "playground", size, scheme)


def test_a_login_that_ended_is_asked_for_again(opened: Opener) -> None:
    page = opened()
    page.context.clear_cookies()
    # The next load of the table leads there, without a click.
    page.wait_for_url("**/console/login")


def test_the_curves_are_downloaded(opened: Opener, tmp_path: Path) -> None:
    page = newest_run(opened())
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as CSV").click()
    download.value.save_as(tmp_path / "curves.csv")
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + steps(page)


def _check(page: Page, name: str, size: str, scheme: str) -> None:
    """axe finds nothing wrong, and the page is no wider than the screen."""
    # A click does not wait for the style sheet.
    page.wait_for_load_state()
    if folder := os.environ.get("TINSMITH_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}-{size}-{scheme}.png", full_page=True)
    found = Axe().run(page, options=RULES)
    assert found.violations_count == 0, f"{urlsplit(page.url).path}: {found.generate_report()}"
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
