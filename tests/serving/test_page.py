"""The page, in a real browser: a prompt is typed, progress and a picture are seen, blocks come and go."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, serving

from greenroom import Omni
from greenroom.demo import checkpoint_path
from greenroom.serving import ServerSettings

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver",
)
# Where a picture of the page goes; only where somebody asks for one.
SCREENSHOTS = os.environ.get("GREENROOM_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--window-size=1280,900", f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


def wait(condition: Callable[[], Any], seconds: float = 30) -> Any:
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "it was not seen"
        time.sleep(0.02)
    return found


def ask(browser: Any, **words: Any) -> None:
    for name, value in words.items():
        field = browser.find_element("name", name)
        field.clear()
        field.send_keys(str(value))
    browser.find_element("id", "go").click()


def errors(browser: Any) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def budgeted(emu_module: Any) -> Iterator[Live]:
    """The demo under a memory budget."""
    omni = Omni(checkpoint_path(), device="emu", memory_budget=4_800_000 + emu_module.memory_allocated())
    with serving(omni, ServerSettings(served_model_name="greenroom-demo", shutdown_timeout=5)) as live:
        yield live


@pytest.mark.skipif(not SCREENSHOTS, reason="GREENROOM_SCREENSHOTS names no folder")
def test_screenshot(browser: Any, budgeted: Live) -> None:
    browser.get(budgeted.url)
    wait(lambda: len(browser.find_elements("css selector", ".component")) == 4)
    ask(browser, prompt="a handwritten seven", num_inference_steps=8, seed=7)
    wait(lambda: browser.find_element("id", "phase").text == "Done.")
    ask(browser, prompt="a handwritten seven", num_inference_steps=80, seed=7)
    wait(lambda: float(browser.find_element("id", "progress").get_property("value")) > 0.6, 60)
    assert browser.save_screenshot(str(Path(SCREENSHOTS or "") / "serving-page.png"))
    wait(lambda: browser.find_element("id", "phase").text == "Done.")


def test_a_picture_is_drawn_and_the_view_changes(browser: Any, live: Live) -> None:
    browser.get(live.url)
    wait(lambda: "FluxPipeline" in browser.find_element("id", "model").text)
    wait(lambda: browser.find_element("id", "health").text == "ok")
    wait(lambda: len(browser.find_elements("css selector", ".component")) == 4)
    before = view(browser)
    ask(browser, prompt="a handwritten seven", num_inference_steps=60, seed=7)
    shares, views = set(), {before}
    while browser.find_element("id", "go").get_property("disabled"):
        shares.add(float(browser.find_element("id", "progress").get_property("value")))
        views.add(view(browser))
        time.sleep(0.02)
    assert len([s for s in shares if 0 < s < 1]) > 3, "no progress was seen"
    assert len(views) > 2, "no block was seen to move"
    assert not browser.find_element("id", "error").is_displayed()
    picture = browser.find_element("id", "picture")
    wait(lambda: browser.execute_script("return arguments[0].naturalWidth", picture) == 32)
    assert "seed 7" in browser.find_element("id", "caption").text
    assert browser.execute_script(INK, "lanes") > 50 and browser.execute_script(INK, "history") > 50
    assert errors(browser) == []


# How many pixels of a canvas are painted.
INK = """
const c = document.getElementById(arguments[0]);
const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n;
"""


def view(browser: Any) -> str:
    script = 'return [...document.querySelectorAll("#components .blocks i")].map((b) => b.className).join(" ")'
    return str(browser.execute_script(script))


def test_an_error_is_told_and_a_request_can_be_cancelled(browser: Any, live: Live) -> None:
    browser.get(live.url)
    wait(lambda: "FluxPipeline" in browser.find_element("id", "model").text)
    ask(browser, prompt="a handwritten two", height=33)
    wait(lambda: "multiples of" in browser.find_element("id", "error").text)
    ask(browser, prompt="a handwritten two", height=32, num_inference_steps=200)
    wait(lambda: "step" in browser.find_element("id", "phase").text)
    browser.find_element("id", "stop").click()
    wait(lambda: browser.find_element("id", "phase").text == "Cancelled.")
    wait(lambda: live.omni.status.running is None, 5)
    ask(browser, prompt="<b>a handwritten two</b>", num_inference_steps=2)
    wait(lambda: browser.find_element("id", "phase").text == "Done.")
    assert browser.find_element("id", "caption").text.startswith("<b>a handwritten two</b>")
    assert all("400" in message for message in errors(browser))


def test_a_video_is_made_and_played(browser: Any, start: Any) -> None:
    server = start("wan22_t2v", "layer")
    browser.get(server.url)
    wait(lambda: "WanPipeline" in browser.find_element("id", "model").text)
    wait(lambda: browser.find_element("name", "num_frames").is_displayed())
    ask(browser, prompt="a red cube", width=32, height=32, num_frames=5, num_inference_steps=2)
    wait(lambda: browser.find_element("id", "phase").text == "Done.")
    video = browser.find_element("id", "video")
    wait(lambda: browser.execute_script("return arguments[0].videoWidth", video) == 32)
    assert errors(browser) == []


def test_it_fits_a_narrow_window(browser: Any, live: Live) -> None:
    browser.set_window_size(420, 800)
    browser.get(live.url)
    wait(lambda: len(browser.find_elements("css selector", ".component")) == 4)
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    browser.set_window_size(1280, 900)
    assert wide <= 0
