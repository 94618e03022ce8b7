"""The report in a browser: it is whole, works without a network, fits the screen, and its slider prunes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_runs import steps_of, write_page, write_results, write_runs

pytestmark = pytest.mark.identities

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(write_runs(tmp_path_factory.mktemp("runs")), write_results(tmp_path_factory.mktemp("results")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("No Chromium on this machine: apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=[(1200, "light"), (390, "dark")], ids=["desktop", "phone"])
def tab(request: pytest.FixtureRequest, browser: Any, html: Path) -> Iterator[Any]:
    """The page as it is when it has drawn itself; it must ask for nothing and complain about nothing."""
    width, scheme = request.param
    found = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found.set_default_timeout(120_000)
    complaints: list[str] = []
    found.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.goto(html.as_uri(), wait_until="commit")
    found.wait_for_selector("body[data-ready]")
    yield found
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == [html.as_uri()]
    found.close()


def test_every_picture_is_there(tab: Any) -> None:
    assert tab.locator(".plot").count() == 2 + 2 + 1 + 8  # of the network, the curves, the bandit and the paper
    drawn = "[...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('.trace path').length)"
    assert min(tab.evaluate(drawn)) > 0
    assert tab.evaluate("[...document.images].every(image => image.naturalWidth === 28)")
    assert tab.evaluate("document.images.length") == 12


def test_it_fits_the_screen(tab: Any) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    widths = tab.evaluate("[...document.querySelectorAll('.plot svg')].map(svg => svg.clientWidth)")
    assert 0 < max(widths) <= tab.viewport_size["width"]


def test_tables_fit_the_screen(tab: Any) -> None:
    """Those under folds too: nothing has to be scrolled sideways."""
    tab.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    widths = tab.evaluate("[...document.querySelectorAll('.scroll')].map(box => [box.scrollWidth, box.clientWidth])")
    assert len(widths) == 8
    assert all(0 < inside <= box for inside, box in widths)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_slider_moves_the_numbers(tab: Any, html: Path) -> None:
    steps = steps_of(html)
    slider = tab.locator(".prune input")
    assert steps[int(slider.input_value())]["fraction"] == 0.95
    grey = []
    for place in (0, 5, len(steps) - 1):
        slider.fill(str(place))
        step = steps[place]
        assert tab.inner_text(".error") == f"{step['error']:.2f} %"
        assert tab.inner_text(".left") == f"{step['left']:,}"
        assert float(tab.inner_text(".fraction").split()[0]) == pytest.approx(100 * step["fraction"])
        assert tab.inner_text(".bytes").split()[0] == f"{step['bytes'] / 1e3:.0f}"
        colours = tab.evaluate("document.getElementById('run0-snr').data[0].marker.color")
        grey.append(colours.count("#9aa0a6"))
        assert tab.evaluate("document.getElementById('run0-prune').data.at(-1).x") == [
            pytest.approx(100 * step["fraction"])
        ]
    assert grey[0] < grey[1] < grey[2]


def test_light_and_dark(tab: Any) -> None:
    def colours() -> tuple[str, str]:
        return (
            tab.evaluate("getComputedStyle(document.body).backgroundColor"),
            tab.evaluate("getComputedStyle(document.querySelector('.plot text')).fill"),
        )

    dark = tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    before = colours()
    tab.click("#theme")
    after = colours()
    light, night = (after, before) if dark else (before, after)
    assert light == ("rgb(246, 247, 251)", "rgb(27, 31, 42)")
    assert night == ("rgb(18, 20, 27)", "rgb(232, 234, 242)")
