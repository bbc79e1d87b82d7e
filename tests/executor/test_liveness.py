"""Which buffers are still to be read after each op of a program."""

from __future__ import annotations

from dataclasses import replace

from tiny_programs import TinyShape, tiny_program

from shoal.executor.liveness import live_buffers
from shoal.model.program import Add, Op, RmsNorm, SelectRows, View

X, LEFT, RIGHT, BOTH = View("x", 0, 4), View("y", 0, 4), View("y", 4, 4), View("y", 0, 8)


def live(*ops: Op) -> list[set[str]]:
    program = replace(tiny_program(TinyShape()), ops=ops, buffers={"x": 4, "y": 8, "z": 8})
    return [set(buffers) for buffers in live_buffers(program)]


def norm(x: View, out: View) -> RmsNorm:
    return RmsNorm(x, out, "weight", 1e-5)


def test_a_buffer_is_live_until_its_last_reader() -> None:
    assert live(norm(X, LEFT), norm(LEFT, X), norm(X, X)) == [{"y"}, {"x"}, set()]


def test_what_is_overwritten_first_is_not_live() -> None:
    z = View("z", 0, 8)
    assert live(norm(BOTH, z), norm(z, BOTH), norm(BOTH, z)) == [{"z"}, {"y"}, set()]


def test_writing_some_columns_leaves_the_others_live() -> None:
    assert live(norm(X, RIGHT), norm(X, LEFT), norm(RIGHT, X)) == [{"x", "y"}, {"y"}, set()]


def test_what_changes_in_place_is_read() -> None:
    assert live(norm(X, LEFT), Add(X, LEFT), SelectRows(X, LEFT)) == [{"x", "y"}, {"x"}, set()]
