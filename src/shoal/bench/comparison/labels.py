"""Where labels stand beside their points so that they hide neither points nor each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Place = tuple[float, float]  # x to the right, y upwards
Box = tuple[float, float, float, float]  # left, bottom, right, top

MARKER = 4.0  # half of a marker's width; like all lengths here in points of the picture
GAPS = (2.0, 8.0, 16.0)  # between marker and label, the nearest first


def place_labels(points: Sequence[Place], width: float, height: float) -> list[Place]:
    """The lower left corner of the label of each point, all of one size.

    Each label takes the first place around its point, the nearer ones first, that hides nothing;
    or, where there is none, the one that hides least.
    """
    markers = [_box(x - MARKER, y - MARKER, 2 * MARKER, 2 * MARKER) for x, y in points]
    taken = list(markers)
    places: list[Place] = []
    for point in points:
        candidates = list(_candidates(point, width, height))
        hidden = [
            sum(_overlap(_box(*place, width, height), box) for box in taken) for place in candidates
        ]
        best = candidates[hidden.index(min(hidden))]
        places.append(best)
        taken.append(_box(*best, width, height))
    return places


def _box(left: float, bottom: float, width: float, height: float) -> Box:
    return left, bottom, left + width, bottom + height


def _candidates(point: Place, width: float, height: float) -> Iterator[Place]:
    """Places above and below, to the right and to the left; the upper right is read most easily."""
    x, y = point
    for gap in GAPS:
        right, left = x + MARKER + gap, x - MARKER - gap - width
        above, below = y + gap, y - gap - height
        yield from ((right, above), (left, above), (right, below), (left, below))
        yield from ((x - width / 2, above + MARKER), (x - width / 2, below - MARKER))


def _overlap(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
