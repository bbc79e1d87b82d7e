"""The command line: what it prints, where, and how it exits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from gguf_files import TinyModel, write_tiny_model

from shoal.config import EngineConfig
from shoal.server.config import ServerConfig


def shoal(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"} | (env or {}),
        check=False,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("shoal: ")
    for word in words:
        assert word in line


def test_the_help_names_every_command() -> None:
    result = shoal("--help")
    assert result.returncode == 0
    for command in ("serve", "run", "pull", "bench"):
        assert command in result.stdout


def test_the_version_is_printed() -> None:
    result = shoal("--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "shoal")


def test_the_help_of_serve_has_each_setting_once() -> None:
    words = shoal("serve", "--help").stdout.split()
    for setting in (*fields(EngineConfig), *fields(ServerConfig)):
        flag = "--" + setting.name.replace("_", "-")
        assert words.count(flag) == 1, flag


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys; from shoal.cli import main; main(['serve', '--help']); "
        "heavy = 'numpy', 'starlette', 'tokenizers', 'jinja2', 'zmq', 'prometheus_client'; "
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], ["frobnicate"]),
        (["serve", "--frobnicate"], ["--frobnicate"]),
        (["serve", "--max-num-seqs", "many"], ["--max-num-seqs", "many"]),
        (["serve", "--max-num-seqs", "0"], ["max_num_seqs", "0"]),
        (["serve", "--port", "99999"], ["port", "99999"]),
        (["serve", "--shutdown-timeout", "-1"], ["shutdown_timeout", "-1"]),
        (["serve", "--scheduler", "psychic"], ["psychic"]),
        (["serve", "--skip-padding"], ["skip_padding", "static and dynamic", "continuous"]),
        (["serve", "--scheduler", "static", "--max-queue-delay", "-1"], ["max_queue_delay", "-1"]),
        (["serve", "--scheduler", "dynamic", "--enable-priority-preemption"], ["continuous"]),
        (
            ["serve", "--scheduler", "dynamic", "--preferred-batch-sizes", "33"],
            ["preferred_batch_sizes", "33", "32"],
        ),
        (["serve", "--max-queue-time", "nan"], ["max_queue_time", "nan"]),
        (["serve", "--max-total-time", "-1"], ["max_total_time", "-1"]),
        (["serve", "--api-key", ""], ["api_key"]),
        (["serve", "a", "b"], ["b"]),
        (["run", "smollm2-135m", "hi", "--temperature", "-1"], ["temperature", "-1"]),
        (["pull"], ["MODEL"]),
    ],
)
def test_a_wrong_usage_is_one_line_and_exit_status_2(
    arguments: list[str], words: list[str]
) -> None:
    assert_one_line(shoal(*arguments), 2, *words)


def test_a_model_that_does_not_exist_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    assert_one_line(shoal("pull", missing), 1, missing)
    assert_one_line(shoal("run", missing, "hi"), 1, missing)
    assert_one_line(shoal("serve", missing, "--port", "0"), 1, missing)


def test_a_file_that_is_no_model_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html>" * 100)
    assert_one_line(shoal("serve", str(page), "--port", "0"), 1, "page.gguf")
    assert_one_line(shoal("run", str(page), "hi"), 1, "page.gguf")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (TinyModel(head_dim=24), ("head_dim", "24")),
        (TinyModel(chat_template="{% if %}"), ("chat template",)),
        (TinyModel(architecture="mamba"), ("mamba",)),
    ],
    ids=lambda value: getattr(value, "architecture", ""),
)
def test_a_model_that_cannot_run_is_one_line(
    tmp_path: Path, model: TinyModel, words: tuple[str, ...]
) -> None:
    path = write_tiny_model(tmp_path / "odd.gguf", model)
    assert_one_line(shoal("serve", str(path), "--port", "0"), 1, *words)
    result = shoal("run", str(path), "hi")
    assert_one_line(result, result.returncode, *words)
    assert result.returncode in (1, 2)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.99])
def test_a_truncated_file_is_one_line_and_exit_status_1(tmp_path: Path, share: float) -> None:
    path = write_tiny_model(tmp_path / "cut.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert_one_line(shoal("serve", str(path), "--port", "0"), 1, "cut.gguf")


def test_what_the_machine_does_not_have_is_one_line(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    serve = ("serve", path, "--port", "0")
    assert_one_line(shoal(*serve, env={"SHOAL_ISA": "foo"}), 1, "instruction set foo")
    assert_one_line(shoal(*serve, "--kv-cache-memory-mib", "99999999"), 1, "kv_cache_memory_mib")
    run = ("run", path, "hi", "--kv-cache-memory-mib", "99999999999999")
    assert_one_line(shoal(*run), 2, "kv_cache_memory_mib")


def test_a_host_that_is_not_ours_is_one_line_and_exit_status_1() -> None:
    assert_one_line(shoal("serve", "--host", "192.0.2.1", "--port", "0"), 1, "192.0.2.1")
    assert_one_line(shoal("serve", "--host", "no such host"), 1, "no such host")


def test_pull_prints_the_path_on_stdout(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    result = shoal("pull", str(model))
    assert (result.returncode, result.stdout) == (0, f"{model}\n")
