"""The timeline of a replay: which request held which slot when, and what was computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from shoal.bench.runs.steps import RowKind, StepRecord

# Readable in print, and told apart by people who don't see red and green differ.
COLOURS = {RowKind.PREFILL: "#e69f00", RowKind.DECODE: "#0072b2", RowKind.PADDING: "#d0d0d0"}
LABELS = {
    RowKind.PREFILL: "prefill",
    RowKind.DECODE: "decode",
    RowKind.PADDING: "padding: computed and thrown away",
}


@dataclass(slots=True)
class Segment:
    """A time in which a request's row was of one kind; seconds after the start."""

    kind: RowKind
    start: float
    end: float


@dataclass(slots=True)
class Lane:
    """The stay of one request in a slot."""

    request_id: str
    slot: int
    segments: list[Segment] = field(default_factory=list)


def lanes_of(steps: Sequence[StepRecord]) -> list[Lane]:
    """Give each request the lowest free slot, from its first step to its last.

    A request that was preempted keeps its slot in the picture, with a gap.
    """
    last_step = {request_id: index for index, step in enumerate(steps) for request_id in step.rows}
    lanes: dict[str, Lane] = {}
    taken: set[int] = set()
    for index, step in enumerate(steps):
        for request_id, kind in step.rows.items():
            if request_id not in lanes:
                slot = next(n for n in range(len(taken) + 1) if n not in taken)
                taken.add(slot)
                lanes[request_id] = Lane(request_id, slot)
            _extend(lanes[request_id].segments, Segment(kind, step.start, step.end))
        ended = [request_id for request_id in step.rows if last_step[request_id] == index]
        taken -= {lanes[request_id].slot for request_id in ended}
    return list(lanes.values())


def draw_timeline(axes: Axes, steps: Sequence[StepRecord], title: str, *, names: bool) -> None:
    """Draw the slots from top to bottom over time; with `names` each request's id in its lane.

    The caller sets the limits of the time axis, which panels may share.
    """
    for lane in lanes_of(steps):
        for kind, colour in COLOURS.items():
            spans = [(s.start, s.end - s.start) for s in lane.segments if s.kind is kind]
            axes.broken_barh(spans, (lane.slot + 0.1, 0.8), facecolors=colour)
        if names:
            axes.text(
                lane.segments[0].start,
                lane.slot + 0.5,
                f" {lane.request_id.partition('/')[0]}",
                va="center",
                fontsize=8,
                fontweight="bold",
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel("slot")
    axes.invert_yaxis()
    axes.set_yticks([])


def legend_entries() -> list[Patch]:
    """What the colours mean, for the legend of a figure."""
    return [Patch(facecolor=colour, label=LABELS[kind]) for kind, colour in COLOURS.items()]


def _extend(segments: list[Segment], new: Segment) -> None:
    """Append a segment, or stretch the last one if it goes on; the pause between steps is tiny."""
    if segments and segments[-1].kind is new.kind and new.start - segments[-1].end < 0.002:
        segments[-1].end = new.end
    else:
        segments.append(new)
