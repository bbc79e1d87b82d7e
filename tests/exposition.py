"""Reads Prometheus' text format as `promtool check metrics` does: samples, and what is wrong."""

from __future__ import annotations

import math
import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TYPES = ("counter", "gauge", "histogram")
RESERVED = ("_bucket", "_count", "_sum", "_info", "_created")
# Prometheus wants base units: seconds, bytes, and ratios instead of percents.
NOT_BASE_UNITS = re.compile(
    r"_(ns|us|ms|s|nanoseconds|microseconds|milliseconds|minutes|hours|days|kb|mb|gb|kib|mib|gib"
    r"|kilobytes|megabytes|gigabytes|bits|percent|percents)(_|$)"
)


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(text: str, name: str, **labels: str) -> float:
    """The one sample of that name with these labels among its own."""
    found = [
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
    return float(found[0])


def problems(text: str) -> list[str]:
    """What promtool would say; it dislikes the colon too, which marks the field's own names."""
    return _metadata_problems(text) + _name_problems(text) + _sample_problems(text)


def _metadata_problems(text: str) -> list[str]:
    found = []
    for kind in ("HELP", "TYPE"):
        names = Counter(re.findall(rf"^# {kind} (\S+) \S", text, re.MULTILINE))
        found += [f"{name} has several {kind} lines" for name, n in names.items() if n > 1]
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            if name not in names:
                found.append(f"{name} has no {kind}")
    return found


def _name_problems(text: str) -> list[str]:
    found = []
    for family in text_string_to_metric_families(text):
        name = family.name
        if not re.fullmatch(r"shoal:[a-z][a-z0-9_]*", name):
            found.append(f"{name} is not prefixed snake case")
        if family.type not in TYPES:
            found.append(f"{name} is a {family.type}")
        if name.endswith((*RESERVED, "_total")) or any(f"_{kind}" in name for kind in TYPES):
            found.append(f"{name} contains its type or a reserved suffix")
        if NOT_BASE_UNITS.search(name):
            found.append(f"{name} has no base unit")
        if re.search(r"_(time|latency)(_|$)", name) and not name.endswith("_seconds"):
            found.append(f"{name} is a time and doesn't say its unit")
    return found


def _sample_problems(text: str) -> list[str]:
    found = []
    keys = Counter((s.name, tuple(sorted(s.labels.items()))) for s in samples(text))
    found += [f"{name} {labels} is there {n} times" for (name, labels), n in keys.items() if n > 1]
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "counter" and not 0 <= sample.value < math.inf:
                found.append(f"{sample.name} counts {sample.value}")
            if family.type != "histogram" and "le" in sample.labels:
                found.append(f"{sample.name} has a label of histograms")
        if family.type == "histogram":
            found += _histogram_problems(family.name, family.samples)
    return found


def _histogram_problems(name: str, of_family: list[Sample]) -> list[str]:
    buckets = [s for s in of_family if s.name == f"{name}_bucket"]
    counts = [s.value for s in buckets]
    totals = [s.value for s in of_family if s.name == f"{name}_count"]
    found = []
    if [s.labels["le"] for s in buckets][-1:] != ["+Inf"]:
        found.append(f"{name} has no bucket for all")
    if counts != sorted(counts) or counts[-1:] != totals:
        found.append(f"the buckets of {name} don't add up")
    if sum(s.name == f"{name}_sum" for s in of_family) != 1:
        found.append(f"{name} has no sum")
    return found
