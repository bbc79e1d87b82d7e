"""Compute threads follow affinity, cgroup quota and cpuset; the system's files are made up here."""

from pathlib import Path

import pytest

from shoal.executor.threads import SystemPaths, available_threads


def fake_system(root: Path, membership: str, files: dict[str, str]) -> SystemPaths:
    paths = SystemPaths(membership=root / "cgroup", cgroups=root / "sys")
    paths.membership.write_text(membership)
    for name, text in files.items():
        path = paths.cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return paths


def test_without_cgroups_affinity_alone_counts(tmp_path: Path) -> None:
    paths = SystemPaths(membership=tmp_path / "none", cgroups=tmp_path / "none")
    assert available_threads(paths, affinity=2) == 2


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("200000 100000", 2),
        ("765000 100000", 7),
        ("50000 100000", 1),
        ("max 100000", 8),
        ("max", 8),
        ("1600000 100000", 8),
        ("300000", 3),
    ],
)
def test_version_2_quota_is_rounded_down_to_at_least_one(
    tmp_path: Path, quota: str, threads: int
) -> None:
    paths = fake_system(tmp_path, "0::/service\n", {"service/cpu.max": quota})
    assert available_threads(paths, affinity=8) == threads


@pytest.mark.parametrize(
    ("quota", "period", "threads"),
    [("200000", "100000", 2), ("765000", "100000", 7), ("25000", "50000", 1), ("-1", "100000", 8)],
)
def test_version_1_quota(tmp_path: Path, quota: str, period: str, threads: int) -> None:
    files = {
        "cpu,cpuacct/docker/x/cpu.cfs_quota_us": quota,
        "cpu,cpuacct/docker/x/cpu.cfs_period_us": period,
    }
    membership = "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n"
    assert available_threads(fake_system(tmp_path, membership, files), affinity=8) == threads


def test_version_1_hierarchy_mounted_under_one_controller_name(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}
    paths = fake_system(tmp_path, "3:cpu,cpuacct:/docker/not-seen-inside\n", files)
    assert available_threads(paths, affinity=8) == 3


def test_the_tightest_group_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = {
        "a/b/c/cpu.max": "max 100000",
        "a/b/cpu.max": "600000 100000",
        "a/cpu.max": "350000 100000",
    }
    assert available_threads(fake_system(tmp_path, "0::/a/b/c\n", files), affinity=8) == 3


@pytest.mark.parametrize(
    ("name", "cpus", "threads"),
    [
        ("cpuset.cpus.effective", "0-3,6", 5),
        ("cpuset.cpus.effective", "7", 1),
        ("cpuset.cpus.effective", "", 8),
    ],
)
def test_version_2_cpuset(tmp_path: Path, name: str, cpus: str, threads: int) -> None:
    paths = fake_system(tmp_path, "0::/pod\n", {f"pod/{name}": cpus})
    assert available_threads(paths, affinity=8) == threads


def test_version_1_cpuset(tmp_path: Path) -> None:
    paths = fake_system(tmp_path, "2:cpuset:/pod\n", {"cpuset/pod/cpuset.cpus": "1,3"})
    assert available_threads(paths, affinity=8) == 2


def test_affinity_below_the_quota_wins(tmp_path: Path) -> None:
    paths = fake_system(tmp_path, "0::/\n", {"cpu.max": "600000 100000"})
    assert available_threads(paths, affinity=2) == 2


def test_this_machine_offers_at_least_one_thread() -> None:
    assert available_threads() >= 1
