"""`make screenshot`: docs/report.png, the page of the committed records as a browser shows it."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from kvq.report.html import write_report
from kvq.results import Store

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
WIDTH, HEIGHT, SCALE = 1200, 1180, 1.5


def main() -> int:
    """Write the image and say how large it is; 1 where there is no browser."""
    from experiments.docs import browser

    if missing := browser.missing():
        print(missing, file=sys.stderr)
        return 1
    target = ROOT / "docs" / "report.png"
    with tempfile.TemporaryDirectory() as folder, browser.browser(WIDTH, HEIGHT, SCALE) as driver:
        page = write_report(Store(ROOT / "results"), Path(folder) / "report.html")
        browser.scheme(driver, "light")
        driver.get(page.as_uri())
        picture = Image.open(io.BytesIO(browser.screenshot(driver))).convert("RGB")
    picture.save(target, optimize=True)
    print(f"{target.relative_to(ROOT)} ({target.stat().st_size / 1024:.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
