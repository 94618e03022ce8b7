"""The playground in a browser: points, settings, tabs and the keyboard; on a desktop and on a phone."""

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import services
from playgrounds import regression

import uvicorn  # isort: skip

from bayesbackprop.playground import Limits, make_app  # isort: skip
from bayesbackprop.playground.sessions import warm_up  # isort: skip
from bayesbackprop_paper.bench.serving import free_port  # isort: skip

pytestmark = pytest.mark.identities

# Seconds: a browser and a network that trains share what processor there is.
PATIENCE = 240.0

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def wait_until(found: Any) -> None:
    services.wait_until(found, PATIENCE)


class Served:
    """A playground in a thread."""

    def __init__(self) -> None:
        self.app, port = make_app(Limits(sessions=2)), free_port()
        self._server = uvicorn.Server(uvicorn.Config(self.app, port=port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{port}"

    @property
    def sessions(self) -> Any:
        return self.app.state.sessions

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    warm_up()
    made = Served()
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
def page(request: pytest.FixtureRequest, browser: Any, served: Served) -> Iterator[Any]:
    """A page that trains; it must complain about nothing and ask nobody else."""
    width, scheme = request.param
    found = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found.set_default_timeout(PATIENCE * 1000)
    complaints: list[str] = []
    found.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.goto(served.url)
    wait_for_steps(found, 1)
    yield found
    leave(found, served)
    assert complaints == []
    urls = (f"{served.url}/sessions/", "about:blank")
    assert all(url == f"{served.url}/" or url.startswith(urls) for url in asked)


def leave(page: Any, served: Served) -> None:
    """A page that is left says so, and its session ends."""
    page.goto("about:blank")
    wait_until(lambda: len(served.sessions) == 0)
    page.close()


def wait_for(page: Any, condition: str) -> None:
    """Until this is true on the page; its policy lets nobody evaluate text in it, as playwright would."""
    wait_until(lambda: page.evaluate(condition))


def wait_for_steps(page: Any, count: int) -> None:
    wait_for(page, f"+document.body.dataset.step >= {count}")


def spread_at(page: Any, x: float) -> float:
    """The standard deviation that comes from the weights, in the band that is shown."""
    found: float = page.evaluate(f"""() => {{
      const band = newest.trained.picture, at = band.x.reduce((best, each, i) =>
        Math.abs(each - {x}) < Math.abs(band.x[best] - {x}) ? i : best, 0);
      return band.epistemic[at]; }}""")
    return found


def click_at(page: Any, x: float, y: float) -> None:
    page.locator("#picture").scroll_into_view_if_needed()
    box = page.locator("#picture").bounding_box()
    place = page.evaluate(f"[frameNow.x({x}), frameNow.y({y})]")
    page.mouse.click(box["x"] + place[0], box["y"] + place[1])


def points(page: Any) -> list[list[float]]:
    found: list[list[float]] = page.evaluate("task().points")
    return found


def set_range(page: Any, setting: str, value: float) -> None:
    page.locator(f"[data-setting={setting}]").fill(str(value))


def wait_for_work(page: Any, before: int) -> None:
    """Until what is shown is of a later work than ``before``."""
    wait_for(page, f"newest && newest.work > {before}")


@pytest.mark.learning
def test_a_point_is_added_and_the_band_narrows_there(page: Any) -> None:
    wait_for_steps(page, 150)
    before, wide, count = page.evaluate("newest.work"), spread_at(page, 0), len(points(page))
    for y in (-0.3, 0.3):
        click_at(page, 0.0, y)
    added = points(page)[-2:]
    assert len(points(page)) == count + 2
    assert max(abs(x) for x, _ in added) < 0.02
    assert "26 points" in page.get_attribute("#picture", "aria-label")
    wait_for_work(page, before)
    wait_until(lambda: spread_at(page, 0) < 0.5 * wide)
    click_at(page, 0.0, 0.3)  # a click on a point removes it
    assert points(page)[:count] == points(page)[:-1]
    page.click("#undo")
    assert len(points(page)) == count + 2


@pytest.mark.learning
def test_another_prior_changes_the_band(page: Any) -> None:
    wait_for_steps(page, 150)
    before, wide = page.evaluate("newest.work"), spread_at(page, -3)
    set_range(page, "prior_scale", -1.0)  # of its log10
    assert page.evaluate("task().settings.prior_scale") == 0.1
    wait_for_work(page, before)
    wait_until(lambda: spread_at(page, -3) < 0.5 * wide)
    path = page.get_attribute("#band95", "d")
    assert path.startswith("M")
    assert page.locator("path.drawn").count() == 8


def test_everything_is_drawn(page: Any) -> None:
    wait_for_steps(page, 20)
    for name in ("#band95", "#band50", "#median", "#epistemic", "#aleatoric"):
        assert page.locator(name).count() == 1, name
    assert page.locator("#energy path.curve").count() == 3
    assert page.locator("#snr rect").count() == 40
    assert "step" in page.inner_text("#status")
    assert "1,153 weights" in page.inner_text("#status")
    assert "Half of all new points" in page.inner_text("#sentence")


def test_classes_are_painted_and_shown(page: Any) -> None:
    page.click("#tab-classification")
    wait_for(page, "newest?.trained?.picture.kind === 'map'")
    assert page.locator("path.drawn").count() == 8
    count = len(points(page))
    page.locator("[name=class][value='2']").check(force=True)
    before = page.evaluate("newest.work")
    click_at(page, 2.0, 2.5)
    assert points(page)[-1] == [pytest.approx(2.0, abs=0.02), pytest.approx(2.5, abs=0.02), 2]
    assert len(points(page)) == count + 1
    wait_for_work(page, before)
    assert page.evaluate("newest.trained.picture.probabilities.length") == 3
    colour = "byId('heat').toDataURL()"
    shown = page.evaluate(colour)
    page.locator("[name=map][value=epistemic]").check(force=True)
    assert page.evaluate(colour) != shown
    assert "disagree" in page.inner_text("#sentence")
    assert not page.is_visible("[data-setting=noise]")


def test_the_bandit_runs(page: Any) -> None:
    page.click("#tab-bandit")
    wait_for(page, "newest?.played?.steps.length > 10")
    assert not page.is_visible("#stage")
    assert page.inner_text("#name-0"), page.inner_text("#name-1") == ("Thompson sampling", "Epsilon-greedy")
    for player in ("#player-0", "#player-1"):
        assert page.locator(f"{player} path.curve").count() == 6  # beliefs and truths
    assert page.locator("#regret path.curve").count() == 2
    assert page.locator("#taken rect").count() == 6
    step = page.evaluate("newest.step")
    before = page.evaluate("newest.work")
    page.click("#controls .bandit button")
    wait_for_work(page, before)
    assert page.evaluate("newest.step") < step
    page.click("#tab-regression")
    wait_for(page, "newest?.trained?.picture.kind === 'band'")


def test_all_is_reached_by_the_keyboard(page: Any) -> None:
    page.focus("#tab-regression")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-classification"
    assert page.get_attribute("#tab-classification", "aria-selected") == "true"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "picture"
    count = len(points(page))
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    assert points(page)[-1] == [0.2, 0.1]
    assert f"Added at 0.2, 0.1. {count + 1} points." in page.inner_text("#said")
    page.keyboard.press("Backspace")
    assert len(points(page)) == count
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent || document.activeElement.dataset.setting || ''"))
    assert {"Gap", "Sine", "Step", "Clear", "Restart", "prior_scale", "noise", "temperature", "Network"} <= reached
    named = page.evaluate("""[...document.querySelectorAll('input, select, button')].filter(each =>
      !(each.labels?.length && each.labels[0].textContent.trim()) && !each.textContent.trim()).length""")
    assert named == 0  # every control has a name


def test_presets_clear_and_pause(page: Any) -> None:
    page.click("#presets button:has-text('Sine')")
    assert len(points(page)) == 40
    page.click("#clear")
    assert points(page) == []
    before = page.evaluate("newest.work")
    wait_for_work(page, before)  # without points it shows the prior
    page.locator("[name=pace][value='0']").check(force=True)
    wait_for(page, "document.getElementById('status').textContent.includes('paused')")


def test_what_is_refused_is_said_on_the_page(browser: Any, served: Served) -> None:
    found = browser.new_page()
    found.set_default_timeout(PATIENCE * 1000)
    found.goto(served.url)
    wait_for_steps(found, 1)
    found.select_option("[data-setting=family]", "full")
    assert found.evaluate("task().settings.width") == 16  # what it is quick for
    found.click("summary")
    set_range(found, "width", 32)
    found.wait_for_selector("#problem:not([hidden])")
    assert "another than 'full' for more than 400 weights" in found.inner_text("#problem")
    found.select_option("[data-setting=family]", "diagonal")
    found.wait_for_selector("#problem", state="hidden")
    found.select_option("[data-setting=family]", "conditional")
    found.select_option("[data-setting=prior]", "laplace")
    assert found.evaluate("task().settings.family") == "diagonal"
    assert found.is_enabled("[data-setting=estimator]")
    leave(found, served)


def test_a_session_that_was_forgotten_is_made_again(browser: Any, served: Served) -> None:
    found = browser.new_page()
    found.set_default_timeout(PATIENCE * 1000)
    found.goto(served.url)
    wait_for_steps(found, 3)
    (name,) = served.sessions._by_name
    served.sessions.close(name)
    wait_until(lambda: name in served.sessions._by_name)
    wait_for_steps(found, 3)
    assert not found.is_visible("#problem")
    leave(found, served)


def test_too_many_pages_are_told_so(browser: Any, served: Served) -> None:
    for digit in "12":
        served.sessions.put(digit * 32, regression(pace=0))
    found = browser.new_page()
    found.set_default_timeout(PATIENCE * 1000)
    found.goto(served.url)
    found.wait_for_selector("#problem:not([hidden])")
    assert "2 pages open already" in found.inner_text("#problem")
    found.close()
    for digit in "12":
        served.sessions.close(digit * 32)


def test_it_fits_the_screen(page: Any) -> None:
    for tab in ("regression", "classification", "bandit"):
        page.click(f"#tab-{tab}")
        wait_for(page, "newest !== null")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # The picture comes before everything but the tabs.
        top = page.locator("#stage, .pair figure").locator("visible=true").first.bounding_box()["y"]
        assert top < 220


def test_light_and_dark_are_both_readable(page: Any) -> None:
    """The contrast of text on its ground is at least 4.5, as WCAG asks for."""
    contrast = """() => {
      const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
          .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
      const ground = node => { for (; node; node = node.parentElement) {
          const found = getComputedStyle(node).backgroundColor; if (!/, 0\\)|transparent/.test(found)) return found; }
          return getComputedStyle(document.body).backgroundColor; };
      return ['body', '.faint', '#status', '.key', 'label', '.value', '[role=tab][aria-selected=false]', 'button',
              'legend', 'figcaption', 'select', 'summary'].map(name => {
        const node = document.querySelector(name), ink = light(getComputedStyle(node).color);
        const paper = light(ground(node));
        return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05); });
    }"""
    assert min(page.evaluate(contrast)) >= 4.5


def test_a_playground_that_is_gone_is_said(browser: Any) -> None:
    served = Served()
    found = browser.new_page()
    found.set_default_timeout(PATIENCE * 1000)
    found.goto(served.url)
    wait_for_steps(found, 1)
    served.end()
    found.wait_for_selector("#problem:not([hidden])")
    assert "Is bbb playground still running?" in found.inner_text("#problem")
    found.close()
