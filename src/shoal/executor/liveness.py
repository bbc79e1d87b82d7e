"""Which buffers of a program are still to be read."""

from __future__ import annotations

from dataclasses import fields

from shoal.model.program import Op, Program, View


def live_buffers(program: Program) -> list[frozenset[str]]:
    """For each op the buffers that later ops read before one of them overwrites all columns."""
    live: frozenset[str] = frozenset()
    after_ops = []
    for op in reversed(program.ops):
        after_ops.append(live)
        live = live - _overwritten(op, program.buffers) | _read(op)
    return after_ops[::-1]


def _read(op: Op) -> set[str]:
    views = (getattr(op, field.name) for field in fields(op) if field.name != "out")
    return {view.buffer for view in views if isinstance(view, View)}


def _overwritten(op: Op, columns: dict[str, int]) -> set[str]:
    out = getattr(op, "out", None)
    return {out.buffer} if out is not None and out.width == columns[out.buffer] else set()
