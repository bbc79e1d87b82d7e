"""Labels of points that lie close together can all be read."""

from __future__ import annotations

from itertools import combinations

import pytest

from shoal.bench.comparison.labels import MARKER, Place, place_labels

WIDTH, HEIGHT = 20.0, 8.0


def hidden(points: list[Place]) -> bool:
    """Whether any label hides another or a point."""
    labels = [(x, y, x + WIDTH, y + HEIGHT) for x, y in place_labels(points, WIDTH, HEIGHT)]
    markers = [(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in points]
    pairs = [*combinations(labels, 2), *((a, b) for a in labels for b in markers)]
    return any(
        min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1]) for a, b in pairs
    )


def test_a_point_alone_has_its_label_to_the_upper_right() -> None:
    ((x, y),) = place_labels([(100.0, 50.0)], WIDTH, HEIGHT)
    assert x > 100 + MARKER
    assert 50 < y < 55


@pytest.mark.parametrize(
    "points",
    [
        [(100.0, 50.0), (100.0, 50.0)],
        [(100.0, 50.0), (109.0, 51.0), (118.0, 50.0)],
        [(100.0, 50.0), (101.0, 58.0), (99.0, 42.0), (108.0, 50.0)],
        [(0.0, 0.0), (25.0, 5.0), (50.0, 10.0), (12.0, 0.0)],
    ],
    ids=["on one place", "side by side", "around one", "in a line"],
)
def test_close_points_have_labels_that_hide_nothing(points: list[Place]) -> None:
    assert not hidden(points)


def test_a_crowd_has_a_label_each() -> None:
    assert len(set(place_labels([(100.0, 50.0)] * 30, WIDTH, HEIGHT))) > 10
