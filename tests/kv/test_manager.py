from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.kv.manager import KVCacheManager
from shoal.request import Request, SamplingParams

BLOCK = 4


def request(name: str, num_tokens: int = 10) -> Request:
    return Request(name, list(range(num_tokens)), SamplingParams(), max_tokens=100, seed=0)


def test_blocks_are_taken_only_when_tokens_reach_into_them() -> None:
    kv_cache = KVCacheManager(num_blocks=8, block_size=BLOCK)
    a = request("a")
    for num_computed, num_blocks in [(0, 1), (3, 1), (4, 2), (7, 2), (8, 3)]:
        a.num_computed_tokens = num_computed
        assert kv_cache.allocate_slots(a, 1)
        assert len(kv_cache.block_table(a)) == num_blocks


def test_a_chunk_takes_all_its_blocks_or_none() -> None:
    kv_cache = KVCacheManager(num_blocks=2, block_size=BLOCK)
    a = request("a")
    assert not kv_cache.allocate_slots(a, 2 * BLOCK + 1)
    assert kv_cache.num_free_blocks == 2
    assert kv_cache.allocate_slots(a, 2 * BLOCK)
    assert kv_cache.num_free_blocks == 0


def test_room_counts_the_rest_of_the_last_block_and_the_free_blocks() -> None:
    kv_cache = KVCacheManager(num_blocks=3, block_size=BLOCK)
    a = request("a")
    kv_cache.allocate_slots(a, 1)
    a.num_computed_tokens = 1
    assert kv_cache.room_for(a) == 3 + 2 * BLOCK


def test_missing_blocks_are_those_of_the_known_tokens() -> None:
    kv_cache = KVCacheManager(num_blocks=8, block_size=BLOCK)
    a = request("a", num_tokens=2 * BLOCK + 1)
    assert kv_cache.missing_blocks(a) == 3
    kv_cache.allocate_slots(a, 1)
    assert kv_cache.missing_blocks(a) == 2


def test_freeing_returns_everything_and_may_be_repeated() -> None:
    kv_cache = KVCacheManager(num_blocks=8, block_size=BLOCK)
    a = request("a")
    kv_cache.allocate_slots(a, 10)
    kv_cache.free(a)
    kv_cache.free(a)
    assert kv_cache.num_used_blocks == 0
    assert not kv_cache.block_table(a)
    kv_cache.check()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.booleans()), max_size=80),
    st.integers(1, 12),
)
def test_no_block_is_in_two_tables_or_lost(
    moves: list[tuple[int, int, bool]], num_blocks: int
) -> None:
    kv_cache = KVCacheManager(num_blocks, block_size=BLOCK)
    requests = [request(str(index)) for index in range(5)]
    for index, num_tokens, is_free in moves:
        if is_free:
            kv_cache.free(requests[index])
            requests[index].num_computed_tokens = 0
        elif kv_cache.allocate_slots(requests[index], num_tokens):
            requests[index].num_computed_tokens += num_tokens
        tables = [kv_cache.block_table(r) for r in requests]
        held = [block_id for table in tables for block_id in table]
        assert len(held) == len(set(held)) == kv_cache.num_used_blocks
        for r, table in zip(requests, tables, strict=True):
            assert len(table) == kv_cache.blocks_for(r.num_computed_tokens)
        kv_cache.check()
