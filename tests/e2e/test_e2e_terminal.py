"""`shoal run` with the real model, and the benchmark command with a tiny one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

QUESTION, ANSWER = "What is 2 + 2?", "is 4"


def shoal(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_question_is_answered_once(model_path: Path) -> None:
    result = shoal("run", str(model_path), QUESTION, "--max-tokens", "32")
    assert result.returncode == 0, result.stderr
    assert ANSWER in result.stdout
    assert result.stderr == ""


def test_a_chat_goes_on_after_a_question_that_is_too_long(model_path: Path) -> None:
    questions = f"{'long ' * 100}\n{QUESTION}\n/clear\n{QUESTION}\n/exit\nnever asked\n"
    limits = ("--max-model-len", "80", "--max-tokens", "16")
    result = shoal("run", str(model_path), *limits, stdin=questions)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(ANSWER) == 2
    (refusal,) = result.stderr.splitlines()
    assert "80" in refusal


def test_a_prompt_that_does_not_fit_is_one_line(tiny_model: Path) -> None:
    result = shoal("run", str(tiny_model), "long " * 100, "--max-model-len", "64")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "64" in line


def test_the_throughput_benchmark_runs_and_writes_its_figures(
    tiny_model: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    workload = ("--num-requests", "4", "--input-len", "10:20", "--output-len", "5:10")
    result = shoal(
        "bench", "throughput", "--model", str(tiny_model), *workload, "--json", str(report)
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(report.read_text())["figures"]
