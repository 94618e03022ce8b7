"""The live page in a browser: it shows the state, follows it, fits the screen and asks for a token."""

import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services import PATIENCE, rewarded, settings_in, wait_until, wait_until_learnt

import uvicorn  # isort: skip

from bayesbackprop.serving import make_app  # isort: skip
from bayesbackprop.serving.access import digest  # isort: skip
from bayesbackprop_paper.bench.serving import free_port  # isort: skip

pytestmark = pytest.mark.identities

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TOKEN = "a-token-of-many-letters"


class Served:
    """A service in a thread, and a client of it."""

    def __init__(self, folder: Path, token: str | None = None) -> None:
        import httpx2

        tokens = {} if token is None else {"tokens": (digest(token),)}
        self.app, port = make_app(settings_in(folder, actions=3, **tokens)), free_port()
        self._server = uvicorn.Server(uvicorn.Config(self.app, port=port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{port}"
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.client = httpx2.Client(base_url=self.url, headers=headers)

    def end(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    for seed in range(2):  # what the second decides by, the first has taught
        rewarded(made.client, 60, seed)
        wait_until_learnt(made.client)
    yield made
    made.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("No Chromium on this machine: apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1200, "light"), (390, "dark")], ids=["desktop", "phone"])
def tab(request: pytest.FixtureRequest, browser: Any, served: Served) -> Iterator[Any]:
    width, scheme = request.param
    found = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found.set_default_timeout(PATIENCE * 1000)
    complaints: list[str] = []
    found.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.goto(served.url)
    found.wait_for_selector("body[data-ready]")
    found.wait_for_selector("#shown:not([hidden])")
    yield found
    assert complaints == []
    assert {url for url in asked if not url.startswith("data:")} == {f"{served.url}/", f"{served.url}/state"}
    found.close()


def figure(tab: Any, name: str) -> str:
    text: str = tab.inner_text(f"#numbers [data-name={name}] b")
    return text


def test_it_shows_the_state(tab: Any, served: Served) -> None:
    state = served.client.get("/state").json()
    assert figure(tab, "decisions") == f"{state['decisions']:,}"
    assert figure(tab, "rewards") == f"{state['rewards']:,}"
    assert figure(tab, "waiting") == str(state["waiting"])
    assert tab.inner_text("#status") == "working"
    assert "LinearThompson, 3 features, 3 actions" in tab.inner_text("#about")
    rows = tab.locator("#arms tr")
    assert rows.count() == 1 + 3
    for arm in state["arms"]:
        row = rows.nth(1 + arm["action"])
        assert row.locator("td").first.inner_text() == str(arm["action"])
        assert row.locator("svg circle").count() == 1
        assert row.locator("svg line.one").count() == 2
        assert row.locator("svg line.two").count() == (arm["reward"] is not None)


def test_dots_stand_in_the_order_of_the_means(tab: Any, served: Served) -> None:
    means = [arm["mean"] for arm in served.client.get("/state").json()["arms"]]
    places = tab.evaluate("[...document.querySelectorAll('#arms circle')].map(dot => +dot.getAttribute('cx'))")
    order = range(len(means))
    assert sorted(order, key=lambda arm: means[arm]) == sorted(order, key=lambda arm: places[arm])
    assert 0 < min(places) < max(places) < 500


def test_the_curve_of_regret_never_falls(tab: Any) -> None:
    path = tab.get_attribute("#regret path.curve", "d")
    heights = [float(part.split()[1]) for part in path.replace("L", "M").split("M")[1:]]
    assert len(heights) > 10
    assert all(later <= earlier + 0.06 for earlier, later in pairwise(heights))  # y points down


@pytest.mark.parametrize("last", [1, 600, 100_000, 999_999, 5e7])
def test_labels_of_the_axes_are_not_cut_off(last: float, tab: Any) -> None:
    reaches = """last => {
      const svg = document.getElementById("regret"), width = svg.viewBox.baseVal.width;
      chart(svg, [{kind: "one", points: [[0, 0], [last, last]]}], number);
      return [...svg.querySelectorAll("text")].map(each => each.getBBox())
        .map(box => Math.min(box.x, width - box.x - box.width));
    }"""
    assert min(tab.evaluate(reaches, last)) >= 0


def test_the_legend_says_that_beliefs_are_those_of_the_decisions(tab: Any) -> None:
    assert "when it made recent decisions" in " ".join(tab.inner_text("section:has(#arms) .key").split())


def test_it_follows(tab: Any, served: Served) -> None:
    before = served.client.get("/state").json()["decisions"]
    rewarded(served.client, 7)
    wait_until(lambda: figure(tab, "decisions") == str(before + 7))
    wait_until(lambda: tab.locator("#rates path.curve").count() == 2)


def test_it_fits_the_screen(tab: Any) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_light_and_dark_are_both_readable(tab: Any) -> None:
    """The contrast of text on its ground is at least 4.5, as WCAG asks for."""
    contrast = """() => {
      const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
          .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
      const ground = light(getComputedStyle(document.body).backgroundColor);
      return ['body', '.faint', '#status', '.key', 'th', 'td'].map(name => {
        const ink = light(getComputedStyle(document.querySelector(name)).color);
        return (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05); });
    }"""
    assert min(tab.evaluate(contrast)) >= 4.5


def test_it_asks_for_the_token(browser: Any, tmp_path: Path) -> None:
    served = Served(tmp_path, TOKEN)
    try:
        rewarded(served.client, 5)
        tab = browser.new_page()
        tab.goto(served.url)
        tab.wait_for_selector("form.asked")
        assert not tab.is_visible("#shown")
        assert "Bearer TOKEN" in tab.inner_text("#status")
        tab.fill("#token", "wrong-token-of-many-letters")
        tab.press("#token", "Enter")
        time.sleep(0.3)
        assert tab.is_visible("form.asked")
        tab.fill("#token", TOKEN)
        tab.press("#token", "Enter")
        tab.wait_for_selector("#shown:not([hidden])")
        assert figure(tab, "decisions") == "5"
        assert not tab.is_visible("#access")
        tab.reload()
        tab.wait_for_selector("#shown:not([hidden])")  # it remembers, until the tab is closed
        tab.close()
    finally:
        served.end()


def test_a_service_that_is_gone_is_said(browser: Any, tmp_path: Path) -> None:
    served = Served(tmp_path)
    tab = browser.new_page()
    tab.goto(served.url)
    tab.wait_for_selector("#shown:not([hidden])")
    served.end()
    tab.wait_for_selector("#status.bad")
    assert tab.inner_text("#status") == "The service does not answer."
    tab.close()
