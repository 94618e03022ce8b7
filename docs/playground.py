"""Take the picture of the playground for the documentation: ``python docs/playground.py``. It needs Chromium."""

import shutil
import threading
import time
from pathlib import Path

import uvicorn
from playwright.sync_api import sync_playwright

from bayesbackprop.playground import make_app
from bayesbackprop.serving.app import prepare_process

PORT = 8009
# Steps after which the picture is taken.
STEPS = 200


def main() -> None:
    """Serve the playground, let it train, and take the picture."""
    prepare_process()
    server = uvicorn.Server(uvicorn.Config(make_app(), port=PORT, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1000, "height": 620}, color_scheme="light")
            page.goto(f"http://127.0.0.1:{PORT}")
            while page.evaluate("+(document.body.dataset.step ?? 0)") < STEPS:
                time.sleep(0.2)
            page.screenshot(path=Path(__file__).with_name("playground.png"))
            chromium.close()
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
