"""The dashboard in a real browser, in front of the real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import exposition
import httpx
import pytest
from browser import CHROMIUM, DRIVER, Browser, chromium
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys
from server_process import ServerProcess, until
from streams import COMPLETIONS, post_alone, post_and_leave_open

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="Chromium and its driver aren't installed (Debian: chromium, chromium-driver)",
    ),
]

ENDLESS = {"prompt": [5, 6], "max_tokens": 20_000, "ignore_eos": True, "stream": True}
API_KEY = "secret"  # that of guarded_server
ROW = "#batch tbody tr"
OWN = "#batch tr.own"


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def browser(driver: Chrome) -> Iterator[Browser]:
    """A window, which is left empty afterwards so that it polls no server."""
    yield Browser(driver)
    driver.get("about:blank")


@contextlib.contextmanager
def going_on(server: ServerProcess, *changes: dict[str, object]) -> Iterator[None]:
    """Requests that go on during the block: `ENDLESS` with each of the changes."""
    with contextlib.ExitStack() as connections:
        for change in changes:
            connections.enter_context(post_and_leave_open(server, ENDLESS | change))
        yield
    until(server.is_idle)


def open_live(browser: Browser, server: ServerProcess, **settings: object) -> None:
    browser.open(server.url, **settings)
    browser.wait(lambda: browser.text("#status") == "Live")


def write_prompt(browser: Browser, text: str, max_tokens: int) -> None:
    """Fill in the form by the keyboard alone."""
    browser.tab_to("prompt")
    browser.press(text)
    browser.tab_to("max-tokens")
    browser.press(*[Keys.BACKSPACE] * 5, str(max_tokens))


def number(browser: Browser, element_id: str) -> int:
    return int(browser.text(f"#{element_id}").replace(",", ""))


def test_the_page_is_small_and_loads_at_once(browser: Browser, tiny_server: ServerProcess) -> None:
    milliseconds = []
    for _ in range(3):  # the machine may be busy with something else for a moment
        open_live(browser, tiny_server)
        timing, resources = browser.run("""
            const [page] = performance.getEntriesByType("navigation");
            const files = performance.getEntriesByType("resource")
                .filter((entry) => !entry.name.endsWith("/state"));
            return [page.loadEventEnd, [page, ...files].map(e => [e.name, e.transferSize])];
        """)
        milliseconds.append(timing)
    assert min(milliseconds) < 1000
    assert all(name.startswith(tiny_server.url) for name, _ in resources)
    assert len(resources) <= 8
    assert sum(size for _, size in resources) < 100_000
    assert browser.errors() == []


def test_a_request_is_shown_within_a_second_of_its_start(
    browser: Browser, server: ServerProcess
) -> None:
    ages = []
    open_live(browser, server)
    for _ in range(5):  # the machine may be busy with something else for a moment
        browser.run("""
            const rows = document.querySelector("#batch tbody");
            window.firstAge = null;
            new MutationObserver((_, observer) => {
                if (!rows.rows.length) return;
                window.firstAge = parseFloat(rows.rows[0].cells[4].textContent);
                observer.disconnect();
            }).observe(rows, { childList: true });
        """)
        with going_on(server, {}):
            browser.wait(lambda: browser.run("return window.firstAge") is not None)
            ages.append(browser.run("return window.firstAge"))
            if ages[-1] < 1:
                break
        browser.wait(lambda: browser.texts(ROW) == [])
    assert min(ages) < 1, ages


def test_everything_is_right_after_a_thousand_requests(
    browser: Browser, tiny_server: ServerProcess
) -> None:
    open_live(browser, tiny_server)
    before = number(browser, "finished")

    async def post_all() -> list[httpx.Response]:
        lock = asyncio.Semaphore(50)

        async def post(index: int) -> httpx.Response:
            async with lock:
                body = {"prompt": [5 + index % 90, 6, 7], "max_tokens": 1}
                return await post_alone(tiny_server, body)

        return await asyncio.gather(*map(post, range(1000)))

    assert {response.status_code for response in asyncio.run(post_all())} == {200}

    browser.wait(lambda: number(browser, "finished") >= before + 1000)
    browser.wait(lambda: number(browser, "num-running") == 0)
    samples = exposition.samples(httpx.get(f"{tiny_server.url}/metrics").text)
    ended = {
        sample.labels["finished_reason"]: sample.value
        for sample in samples
        if sample.name == "shoal:request_success_total"
    }
    assert number(browser, "finished") == before + 1000 == ended["stop"] + ended["length"]
    assert number(browser, "aborted") == ended["abort"]
    assert number(browser, "failed") == ended["error"] == 0
    assert (browser.texts(ROW), browser.texts("#queue tbody tr")) == ([], [])
    assert (number(browser, "blocks-used"), number(browser, "num-waiting")) == (0, 0)
    blocks = [number(browser, f"blocks-{state}") for state in ("used", "cached", "free")]
    assert sum(blocks) == number(browser, "blocks-total")
    assert int(browser.texts("#ttft td")[-1].replace(",", "")) >= 1000
    assert browser.errors() == []


def test_a_prompt_is_sent_and_followed_by_the_keyboard_alone(
    browser: Browser, server: ServerProcess
) -> None:
    open_live(browser, server, width=380)
    write_prompt(browser, "Tell me a long story about a shoal of fish.", 200)
    browser.tab_to("send")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.texts(f"{OWN} .request") == ["yours"])
    browser.wait(lambda: browser.text("#answer-status").startswith("Finished"))
    assert len(browser.text("#answer").split()) > 20
    assert browser.is_shown("#answer")
    browser.wait(lambda: browser.texts(OWN) == [])
    assert browser.errors() == []


def test_enter_sends_and_a_new_line_is_possible(
    browser: Browser, tiny_server: ServerProcess
) -> None:
    open_live(browser, tiny_server)
    write_prompt(browser, "One", 1)
    browser.press_with_shift(Keys.TAB)
    browser.press(Keys.END)
    browser.press_with_shift(Keys.ENTER)
    browser.press("two", Keys.ENTER)
    browser.wait(lambda: browser.text("#answer-status").startswith("Finished: 1 "))
    assert browser.run("return document.getElementById('prompt').value") == "One\ntwo"


def test_the_stop_button_ends_the_request_in_the_engine(
    browser: Browser, one_seat_server: ServerProcess
) -> None:
    open_live(browser, one_seat_server)
    before = number(browser, "aborted")
    with going_on(one_seat_server, {}):
        browser.wait(lambda: len(browser.texts(ROW)) == 1)
        write_prompt(browser, "Hello", 9)
        browser.press(Keys.ENTER)
        browser.wait(lambda: browser.texts("#queue tr.own .request") == ["yours"])
        browser.wait(lambda: browser.text("#answer-status") == "Waiting in the queue")
        browser.tab_to("stop")
        browser.press(Keys.ENTER)
        browser.wait(lambda: browser.text("#answer-status") == "Stopped")
        browser.wait(lambda: browser.texts("#queue tr.own") == [])
        browser.wait(lambda: number(browser, "aborted") == before + 1)
        assert browser.run("return document.activeElement.id") == "prompt"


def test_a_refusal_is_told(browser: Browser, tiny_server: ServerProcess) -> None:
    open_live(browser, tiny_server)
    browser.run("document.getElementById('prompt').value = 'word '.repeat(40000)")
    browser.run("document.getElementById('prompt-form').requestSubmit()")
    browser.wait(lambda: browser.text("#answer-status").startswith("Failed"))
    assert "32768" in browser.text("#answer-status")


def test_each_choice_of_a_request_has_its_index(
    browser: Browser, tiny_server: ServerProcess
) -> None:
    open_live(browser, tiny_server)

    def names() -> list[str]:
        """The rows' words behind the ids of their requests, which have no spaces."""
        return sorted(" ".join(text.split()[1:]) for text in browser.texts(f"{ROW} .request"))

    with going_on(tiny_server, {"n": 3}):
        browser.wait(lambda: names() == ["0/0", "0/1", "0/2"])
    with going_on(tiny_server, {"prompt": [[5], [6]]}):
        browser.wait(lambda: names() == ["0/0", "1/0"])
    with going_on(tiny_server, {}):
        browser.wait(lambda: names() == [""])


@pytest.mark.parametrize("width", [380, 1200])
def test_nothing_is_wider_than_the_window(
    browser: Browser, tiny_server: ServerProcess, width: int
) -> None:
    open_live(browser, tiny_server, width=width)
    with going_on(tiny_server, {"prompt": [5, 6] * 450, "n": 3}):
        browser.wait(lambda: len(browser.texts(ROW)) == 3)
        sizes = browser.run("""
            const page = document.documentElement;
            const inner = [...document.querySelectorAll(".scroll")];
            return [page, ...inner].map(e => [e.scrollWidth, e.clientWidth]);
        """)
        assert all(scroll <= client for scroll, client in sizes), sizes
        indices = browser.run(f"""
            return [...document.querySelectorAll("{ROW} .request div :last-child")].map(index => {{
                const cell = index.closest(".request").getBoundingClientRect();
                const {{width, right}} = index.getBoundingClientRect();
                return width > 0 && right <= cell.right;
            }});
        """)
        assert indices == [True] * 3  # an id is cut off, its index is not
        for selector in ("#send", "#stop", "#prompt", "#batch", "#ttft"):
            assert browser.is_shown(selector)
    assert browser.errors() == []


@pytest.mark.parametrize("width", [320, 380, 1200])
def test_the_colours_of_the_legend_stand_beside_their_words(
    browser: Browser, tiny_server: ServerProcess, width: int
) -> None:
    open_live(browser, tiny_server, width=width)
    places = browser.run("""
        return [...document.querySelectorAll(".swatch")].map(swatch => {
            const word = document.createRange();
            word.selectNodeContents(swatch.parentElement);
            word.setStartAfter(swatch);
            const place = swatch.getBoundingClientRect();
            return [place.right, place.bottom, word.getBoundingClientRect()];
        });
    """)
    assert len(places) == 2
    for right, bottom, word in places:
        assert right <= word["left"] < right + 10
        assert word["top"] < bottom < word["bottom"]


def test_both_colour_schemes_have_colours_that_can_be_read(
    browser: Browser, tiny_server: ServerProcess
) -> None:
    backgrounds = []
    for scheme in ("light", "dark"):
        open_live(browser, tiny_server, scheme=scheme)
        contrasts = browser.run("""
            const style = getComputedStyle(document.documentElement);
            const luminance = (name) => {
                const hex = style.getPropertyValue(name).trim();
                const linear = [1, 3, 5].map((at) => {
                    const part = parseInt(hex.slice(at, at + 2), 16) / 255;
                    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
            };
            const contrast = (one, other) => {
                const [dark, bright] = [luminance(one), luminance(other)].sort((a, b) => a - b);
                return (bright + 0.05) / (dark + 0.05);
            };
            const texts = ["--text", "--quiet", "--prefill", "--decode", "--bad"];
            return Object.fromEntries([
                ...texts.map((name) => [name, contrast(name, "--surface")]),
                ["own", contrast("--decode", "--own")],
                ["button", contrast("--on-accent", "--accent")],
            ]);
        """)
        assert min(contrasts.values()) >= 4.5, (scheme, contrasts)
        backgrounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]


def test_rows_that_are_padding_are_shown_as_such(
    browser: Browser, static_server: ServerProcess
) -> None:
    open_live(browser, static_server)
    assert "static" in browser.text("#model")
    with going_on(static_server, {}, {"max_tokens": 1}):
        browser.wait(lambda: sorted(browser.texts(f"{ROW} .phase")) == ["decode", "padding"])


def test_waiting_requests_are_shown_with_their_priority(
    browser: Browser, one_seat_server: ServerProcess
) -> None:
    open_live(browser, one_seat_server)
    with going_on(one_seat_server, {}, {"priority": 3}):
        browser.wait(lambda: browser.texts("#queue tbody .number:nth-child(2)") == ["3"])
        assert (number(browser, "num-waiting"), len(browser.texts(ROW))) == (1, 1)
        assert browser.is_shown("#queue")
        assert not browser.is_shown("#queue-empty")


def test_what_clients_write_is_shown_and_not_obeyed(
    browser: Browser, tiny_server: ServerProcess
) -> None:
    open_live(browser, tiny_server)
    name = "<img src=x onerror=document.title='owned'>"
    headers = {"x-request-id": name}
    body = ENDLESS | {"max_tokens": 20_000}
    with httpx.stream("POST", tiny_server.url + COMPLETIONS, json=body, headers=headers):
        browser.wait(lambda: browser.texts(f"{ROW} .request") == [name])
    until(tiny_server.is_idle)
    assert browser.run("return document.title").startswith("Shoal")
    assert browser.errors() == []


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(
    browser: Browser, guarded_server: ServerProcess
) -> None:
    browser.open(guarded_server.url)
    browser.wait(lambda: browser.is_shown("#key-form"))
    assert not browser.is_shown("#live")
    assert browser.errors() == []

    browser.press("falsch", Keys.ENTER)
    browser.wait(lambda: "does not accept" in browser.text("#key-note"))

    browser.press(API_KEY, Keys.ENTER)
    browser.wait(lambda: browser.text("#status") == "Live")
    assert browser.is_shown("#live")
    assert not browser.is_shown("#key-form")
    stored = browser.run("return [{...sessionStorage}, {...localStorage}, document.cookie]")
    assert stored == [{"shoal-api-key": API_KEY}, {}, ""]

    write_prompt(browser, "Hello", 3)
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.text("#answer-status").startswith("Finished"))


def test_a_page_that_nobody_sees_asks_nothing(browser: Browser, tiny_server: ServerProcess) -> None:
    open_live(browser, tiny_server)
    script = """
        const [hidden, done] = arguments;
        const polls = () => performance.getEntriesByType("resource")
            .filter((entry) => entry.name.endsWith("/dashboard/state")).length;
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
        setTimeout(() => {
            const before = polls();
            setTimeout(() => done(polls() - before), 1500);
        }, 700);
    """
    assert browser.run_async(script, True) == 0
    assert browser.run_async(script, False) > 0
