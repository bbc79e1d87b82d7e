"""The examples of the README run as they stand, against a server on the port that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

README = Path(__file__).parent.parent / "README.md"
PORT = "8000"
EXAMPLES = re.findall(r"^```(sh|python)\n(.*?)^```", README.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def port(model_path: Path) -> Iterator[int]:
    """A server with the settings of `make serve`, on a free port."""
    command = [sys.executable, "-m", "shoal.cli", "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        banner = ""
        while "ready" not in banner:
            line = server.stdout.readline()
            assert line, f"the server ended: {banner}"
            banner += line
        found = re.search(r"http://127\.0\.0\.1:(\d+)", banner)
        assert found is not None
        yield int(found.group(1))
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.parametrize(("language", "source"), EXAMPLES, ids=lambda text: text[:12].strip())
def test_an_example_runs(port: int, language: str, source: str) -> None:
    source = source.replace(f":{PORT}", f":{port}")
    command = ["sh", "-c", source] if language == "sh" else [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    if "capital of Japan" in source:
        assert "Tokyo" in done.stdout
    else:
        assert len(done.stdout.splitlines()) >= 2
