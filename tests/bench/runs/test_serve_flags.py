"""The flags of an engine's settings, read by the command line that they are for."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from shoal.bench.runs.serve_flags import serve_flags
from shoal.bench.tuning.report import command
from shoal.bench.tuning.space import Setting
from shoal.cli import app
from shoal.config import EngineConfig


def parsed(flags: list[str]) -> EngineConfig:
    """What `shoal serve` makes of them."""
    _, bound, _ = app.parse_args(["serve", *flags], exit_on_error=False, print_error=False)
    model = bound.arguments.get("model")
    engine: EngineConfig = bound.arguments.get("engine", EngineConfig())
    assert model in {None, engine.model}
    return engine


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduler": "static", "max_queue_delay": 0.0, "skip_padding": True},
        {"scheduler": "dynamic", "preferred_batch_sizes": (4, 8), "num_threads": 1},
        {"instruction_set": "avx2"},
        {"enable_chunked_prefill": False, "enable_prefix_caching": False, "seed": 3},
        {"max_queue_time": 2.5, "queue_timeout_action": "delay", "trace_file": "a b.json"},
    ],
    ids=str,
)
def test_the_command_line_reads_the_same_settings_back(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert parsed(serve_flags(config)) == config


def test_only_what_differs_from_the_defaults_has_a_flag() -> None:
    assert serve_flags(EngineConfig(max_num_seqs=8)) == ["--max-num-seqs", "8"]


@pytest.mark.parametrize(
    "setting",
    [
        Setting("continuous", 24, 256),
        Setting("dynamic", 16, 8192),
        Setting("static", 8, 512),
        Setting("continuous", 32, 512),
    ],
    ids=str,
)
def test_the_command_of_a_tuned_setting_gives_it(setting: Setting) -> None:
    shared = EngineConfig(kv_cache_memory_mib=256)
    words = shlex.split(command(shared, setting))
    assert words[:3] == ["shoal", "serve", shared.model]
    assert "--max-num-batched-tokens" in words
    assert parsed(words[3:]) == setting.on(shared)
