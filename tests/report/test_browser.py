"""The report in a browser: no errors, no external requests, no overflow, sufficient contrast."""

import pytest
from browser import PROGRAM, Browser
from hostile import hostile_run

from fastamp.report import write_report

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium or Chrome (apt-get install chromium)"),
]

# Elements wider than the page, except inside scrolling boxes.
OVERFLOWING = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll > *')
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
CONFIG_IS_WIDER = "(box => box.scrollWidth > box.clientWidth)(document.querySelector('#config .scroll'))"
LOADED = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
# Lowest contrast (WCAG 2) between the text of the selected elements and their background.
CONTRAST = """(selector => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true}), known = {};
  const pixel = color => known[color] ??= (canvas.clearRect(0, 0, 1, 1), canvas.fillStyle = color,
    canvas.fillRect(0, 0, 1, 1), [...canvas.getImageData(0, 0, 1, 1).data]);
  const linear = value => value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
  const light = color => pixel(color).slice(0, 3).reduce(
    (sum, value, channel) => sum + linear(value / 255) * [.2126, .7152, .0722][channel], 0);
  const behind = element => !element ? 'white' : pixel(getComputedStyle(element).backgroundColor)[3]
    ? getComputedStyle(element).backgroundColor : behind(element.parentElement);
  return Math.min(...[...document.querySelectorAll(selector)].map(element => {
    const style = getComputedStyle(element);
    const pair = [light(element instanceof SVGElement ? style.fill : style.color), light(behind(element))];
    return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
  }));
})"""
TEXTS = ("p", "td", "th", "dd", "dt", "a", "small", ".drawing text", "figcaption", "span.correct", "span.wrong")


def test_report_fits_the_screen_and_makes_no_external_requests(tmp_path):
    path = write_report(hostile_run(tmp_path), tmp_path / "out")
    with Browser(tmp_path / "profile") as browser:
        backgrounds = set()
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            browser.open(path, width=width, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") == width
            assert browser.value(OVERFLOWING) == []
            assert not browser.value(CONFIG_IS_WIDER)
            assert browser.value(LOADED) and browser.value("document.images.length") > 100
            backgrounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
            for selector in TEXTS if width == 1280 else ():
                assert browser.value(f"{CONTRAST}('{selector}')") >= 4.5, (selector, dark)
            outside = [address for address in browser.requests if not address.startswith("data:")]
            assert outside == [path.resolve().as_uri()]
        assert len(backgrounds) == 2
        assert browser.complaints == []


def test_browser_checks_detect_deliberate_violations(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><p style='width:2000px'>wide</p>"
        "<p style='color:#bbb'>pale</p><script>console.error('a')</script><img src='http://127.0.0.1:9/x.png'>"
    )
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, width=390)
        assert browser.value("document.documentElement.scrollWidth") > 390 and browser.value(OVERFLOWING)
        assert not browser.value(LOADED)
        assert browser.value(f"{CONTRAST}('p')") < 4.5
        assert len(browser.complaints) >= 2 and "http://127.0.0.1:9/x.png" in browser.requests
