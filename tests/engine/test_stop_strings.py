from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.stop_strings import StopMatch, StopStringFinder


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """The text that came out in all, and the stop string that ended it."""
    finder = StopStringFinder(stops)
    out = ""
    for piece in pieces:
        found = finder.push(piece)
        if isinstance(found, StopMatch):
            return out + found.text, found.stop
        out += found
    return out + finder.flush(), None


def test_a_stop_string_across_pieces_is_found_and_nothing_of_it_goes_out() -> None:
    finder = StopStringFinder(["own fox"])
    assert [finder.push(piece) for piece in ["The quick", " br", "ow", "n"]] == [
        "The quick",
        " br",
        "",
        "",
    ]
    assert finder.push(" fox jumps") == StopMatch(text="", stop="own fox")


def test_text_that_only_began_like_a_stop_string_goes_out_late() -> None:
    finder = StopStringFinder(["abcd"])
    assert [finder.push(piece) for piece in ["xa", "bc", "x"]] == ["x", "", "abcx"]


def test_held_text_goes_out_at_the_end() -> None:
    assert run(["abcd"], ["ab"]) == ("ab", None)


def test_a_stop_string_may_begin_inside_a_failed_beginning_of_itself() -> None:
    assert run(["aab"], ["aa", "ab", "x"]) == ("a", "aab")


@pytest.mark.parametrize("pieces", [["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]])
def test_the_match_that_ends_first_wins_however_the_text_is_cut(pieces: list[str]) -> None:
    assert run(["abcd", "bc"], pieces) == ("a", "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(STOPS, st.lists(st.text("abc", max_size=4), max_size=12))
def test_pieces_of_any_size_give_the_same_as_single_characters(
    stops: list[str], pieces: list[str]
) -> None:
    text, stop = run(stops, pieces)
    assert (text, stop) == run(stops, list("".join(pieces)))
    assert all(other not in text for other in stops)
    if stop is None:
        assert text == "".join(pieces)
