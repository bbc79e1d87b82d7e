import pytest

from shoal.bench.workloads.recorded_load import RequestShape, read_trace
from shoal.bench.workloads.workload import Workload, WorkloadError, draw_shapes, generate_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
REPLAYED = "arrived_at,num_prefill_tokens,num_decode_tokens\n7.5,374,44\n11.0,396,109\n9.0,12,3\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 2, 3]}
"""


def write(directory, text, name="trace.csv"):
    path = directory / name
    path.write_text(text)
    return path


def test_azures_dates_become_seconds_after_the_first(tmp_path):
    first, second = read_trace(write(tmp_path, AZURE))
    assert first == RequestShape(374, 44, 0.0)
    assert (second.num_input, second.num_output) == (396, 109)
    assert second.arrival == pytest.approx(4.314579)


def test_seconds_count_from_the_first_arrival(tmp_path):
    shapes = read_trace(write(tmp_path, REPLAYED))
    assert [shape.arrival for shape in shapes] == [0.0, 3.5, 1.5]


def test_lengths_alone_have_no_arrivals(tmp_path):
    assert read_trace(write(tmp_path, LENGTHS)) == [RequestShape(74, 918)]


def test_mooncakes_milliseconds_and_blocks_are_read(tmp_path):
    shapes = read_trace(write(tmp_path, MOONCAKE, "trace.jsonl"))
    assert shapes == [
        RequestShape(600, 5, 0.0, blocks=(0, 1)),
        RequestShape(1100, 6, 2.5, blocks=(0, 2, 3)),
    ]


def test_prompts_share_the_blocks_that_their_trace_shares(tmp_path):
    workload = Workload(trace=write(tmp_path, MOONCAKE, "trace.jsonl"))
    first, second = (r.prompt_token_ids for r in generate_requests(workload, range(1000)))
    assert (len(first), len(second)) == (600, 1100)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:600]


def test_a_stretch_is_in_the_order_of_arrival_and_counts_from_its_start(tmp_path):
    path = write(tmp_path, REPLAYED)
    shapes = draw_shapes(Workload(trace=path, trace_start=1.0, trace_duration=2.6))
    assert shapes == [RequestShape(12, 3, 0.5), RequestShape(396, 109, 2.5)]
    assert [s.arrival for s in draw_shapes(Workload(trace=path))] == [0.0, 1.5, 3.5]
    assert len(draw_shapes(Workload(trace=path, trace_duration=3.5))) == 2
    assert len(draw_shapes(Workload(trace=path, num_requests=1))) == 1


def test_longer_requests_are_cut_and_marked(tmp_path):
    workload = Workload(trace=write(tmp_path, REPLAYED), trace_max_input=380, trace_max_output=50)
    requests = generate_requests(workload, range(10))
    lengths = [(len(r.prompt_token_ids), r.max_tokens, r.cut) for r in requests]
    assert lengths == [(374, 44, False), (12, 3, False), (380, 50, True)]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "", "has no rows"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n", "has no rows"),
        ("a.csv", "x,num_decode_tokens\n1,2\n", "row 1: no column is called one of num_prefill"),
        (
            "a.csv",
            "input_tokens,output_tokens\n1,2\n3,0\n",
            "row 2: output_tokens must be at least",
        ),
        ("a.csv", "input_tokens,output_tokens\n1\n", "row 1"),
        ("a.csv", "input_tokens,output_tokens\nmany,2\n", "row 1.*many"),
        ("a.csv", "arrived_at,input_tokens,output_tokens\nsoon,1,2\n", "row 1.*soon"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "row 1.*soon"),
        ("a.jsonl", '{"input_length": 1, "output_length": 2}\n[]\n', "line 2"),
        ("a.jsonl", "nonsense\n", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path, name, text, reason):
    with pytest.raises(WorkloadError, match=reason):
        read_trace(write(tmp_path, text, name))


def test_a_stretch_without_requests_is_refused(tmp_path):
    path = write(tmp_path, REPLAYED)
    with pytest.raises(WorkloadError, match="no request in the remaining seconds after 99"):
        draw_shapes(Workload(trace=path, trace_start=99.0))


def test_a_stretch_of_a_trace_without_times_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="tells no arrivals"):
        draw_shapes(Workload(trace=write(tmp_path, LENGTHS), trace_start=1.0))
