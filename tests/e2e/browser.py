"""A headless Chromium that looks at the dashboard."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from server_process import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


class Browser:
    """One window; elements are named by their ids or CSS selectors."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, url: str, width: int = 1200, scheme: str = "light") -> None:
        """Load a page in a window of `width` that prefers a colour scheme, and forget errors."""
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self._driver.get_log("browser")
        self._driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._driver.execute_script(script, *arguments)

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The value that a script gives to the function that is its last argument."""
        return self._driver.execute_async_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The text of the first element."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.run(script, selector)

    def is_shown(self, selector: str) -> bool:
        """Whether the first element can be seen."""
        return self._driver.find_element(By.CSS_SELECTOR, selector).is_displayed()

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        actions = webdriver.ActionChains(self._driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def press_with_shift(self, key: str) -> None:
        """Press a key while Shift is held."""
        actions = webdriver.ActionChains(self._driver)
        actions.key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def tab_to(self, element_id: str) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(20):
            if self.run("return document.activeElement.id") == element_id:
                return
            self.press(Keys.TAB)
        raise AssertionError(f"no way to {element_id} by the keyboard")

    def errors(self) -> list[str]:
        """What the console has complained of since the page was opened."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        """Wait until `condition` holds."""
        until(condition, seconds)


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """The browser's process, with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()
