"""A result that could not be written is known before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.bench import throughput, tune
from shoal.bench.results.output_path import require_writable
from shoal.config import ConfigError, EngineConfig


def test_a_new_file_is_fine_and_is_not_left_behind(tmp_path: Path) -> None:
    require_writable("json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text("old")
    require_writable("json", path)
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/a.json", "No such file or directory"),
        (".", "Is a directory"),
        ("file/a.json", "Not a directory"),
        ("a" * 300, "File name too long"),
        ("link", "No such file or directory"),
    ],
)
def test_what_can_not_be_written_is_refused_with_the_reason(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("missing/a.json")
    with pytest.raises(ConfigError, match=f"^json .*{name} can't be written: {reason}$"):
        require_writable("json", tmp_path / name)


def test_a_link_may_lead_to_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new.json")
    require_writable("json", tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_device_is_taken_as_it_is() -> None:
    require_writable("json", Path("/dev/full"))


def test_tune_and_throughput_ask_before_they_load_a_model(tmp_path: Path) -> None:
    json = tmp_path / "missing" / "a.json"
    with pytest.raises(ConfigError, match=r"json .*a\.json can't be written"):
        tune.run(tune.TuneConfig(model="no-such-model", json=json))
    engine = EngineConfig(model="no-such-model")
    with pytest.raises(ConfigError, match=r"json .*a\.json can't be written"):
        throughput.run(throughput.ThroughputConfig(engine=engine, json=json))
