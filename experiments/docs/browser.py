"""A headless Chromium that cannot reach any network, for the report's tests and its screenshot."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """What there is not, in one line; None when a browser can be driven."""
    if not any(map(shutil.which, NAMES)):
        return "needs a browser: none of " + ", ".join(NAMES) + " (Debian: chromium)"
    if not shutil.which("chromedriver"):
        return "needs chromedriver (Debian: chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium (pip install -e '.[test]')"
    return None


@contextmanager
def browser(width: int = 1360, height: int = 1000, scale: float = 1.0) -> Iterator[Any]:
    """A driver of a new, empty profile; `width` and `height` in CSS pixels."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, NAMES)))
    with tempfile.TemporaryDirectory(prefix="kvq-browser-") as profile:
        for word in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "disable-dev-shm-usage",
            "no-first-run",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            "hide-scrollbars",
            "proxy-server=127.0.0.1:9",  # nothing listens there: what the page would fetch fails
            f"user-data-dir={profile}",
        ):
            options.add_argument(f"--{word}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            # The window cannot be as narrow as a telephone; what the page sees can.
            resize(driver, width, height, scale)
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: int, scale: float = 1.0) -> None:
    """What the page takes for its window, in CSS pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def scheme(driver: Any, name: str) -> None:
    """Make the reader prefer `light` or `dark`."""
    features = [{"name": "prefers-color-scheme", "value": name}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def screenshot(driver: Any) -> bytes:
    """What the window shows, as PNG."""
    return driver.get_screenshot_as_png()
