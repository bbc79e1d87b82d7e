import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_server import DONE, delta, event, text, usage

from shoal.bench.client.connection import Response
from shoal.bench.client.load import Failure, failure_of, timeline_of
from shoal.bench.client.stream import AnswerStream, error_message
from shoal.bench.results.measure import measure


def stream_of(*pieces):
    """A stream that got each (time, bytes)."""
    stream = AnswerStream()
    for now, data in pieces:
        stream.feed(data, now)
    return stream


def test_the_figures_of_a_stream_are_exactly_those_of_its_times():
    stream = stream_of(
        (10.1, delta(role="assistant", content="")),
        (11.0, delta(content="a")),
        (11.25, delta(content="b")),
        (11.75, delta(content="c")),
        (11.75, delta("length")),
        (12.0, usage(40, 3, num_cached=16)),
        (12.5, DONE),
    )
    timeline = timeline_of(stream, scheduled=10.0)
    assert timeline.ttft == 1.0
    assert timeline.itls == [0.25, 0.5]
    assert timeline.tpot == 0.375
    assert timeline.e2e == 1.75
    assert timeline.num_input_tokens == 40
    assert timeline.num_output_tokens == 3
    assert timeline.num_cached_tokens == 16
    assert timeline.num_tokens_without_own_chunk == 0


def test_a_chunk_of_several_tokens_is_one_time_and_several_tokens():
    stream = stream_of((1.0, text("a")), (2.0, text("bcd", "length")), (2.0, usage(5, 4)))
    timeline = timeline_of(stream, scheduled=0.0)
    assert timeline.itls == [1.0]
    assert timeline.tpot == pytest.approx(1 / 3)
    assert timeline.num_tokens_without_own_chunk == 2


def test_a_single_token_without_text_has_the_time_of_the_finish_reason():
    stream = stream_of((3.0, text("", "length")), (3.5, usage(5, 1)))
    timeline = timeline_of(stream, scheduled=1.0)
    assert (timeline.ttft, timeline.e2e, timeline.itls) == (2.0, 2.0, [])
    assert measure([timeline], 0).num_itls == 0


@given(st.data())
def test_a_stream_may_be_cut_into_pieces_anywhere(data):
    whole = b": a comment\r\n\r\n" + text("é", None).replace(b"\n", b"\r\n") + text("b", "stop")
    whole += usage(3, 2).replace(b"data: ", b"data:") + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    stream = AnswerStream()
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        stream.feed(whole[start:end], float(end))
    assert len(stream.chunk_times) == 2
    assert stream.finish_reason == "stop"
    assert stream.error is None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (event({"error": {"message": "out of memory", "type": "x"}}), "out of memory"),
        (event({"error": "out of memory"}), "out of memory"),
        (b'error: {"code":500}\n\n', '{"code":500}'),
        (b"data: nonsense\n\n", "not what OpenAI's API sends"),
        (b"data: \xff\n\n", "not what OpenAI's API sends"),
        (b'data: {"choices": 3}\n\n', "not what OpenAI's API sends"),
    ],
)
def test_an_error_within_a_stream_is_kept(data, message):
    stream = stream_of((0.0, text("a")), (1.0, data), (2.0, text("b", "stop")))
    assert message in stream.error
    failure = failure_of(Response(200, "text/event-stream"), stream, b"")
    assert failure == Failure("error_event", stream.error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"odd": 1}', "{'odd': 1}"),
        (b"<html>\n  busy </html>", "<html> busy </html>"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"", ""),
    ],
)
def test_what_an_error_response_says_is_read(body, message):
    assert error_message(body) == message
