from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kv.block_pool import BlockAccountingError, BlockPool


def test_blocks_are_distinct_until_they_come_back() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(BlockAccountingError, match="3 blocks asked for, 2 are free"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_block_that_nobody_holds_cannot_be_given_back() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.give_back([block_id])
    with pytest.raises(BlockAccountingError, match=f"block {block_id} is given back"):
        pool.give_back([block_id])
    pool.check(num_holds=0)


def test_the_check_finds_a_hold_that_callers_forgot() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(BlockAccountingError, match="the pool counts 1 holds"):
        pool.check(num_holds=0)


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_the_books_add_up_after_any_taking_and_giving_back(
    num_blocks: int, moves: list[tuple[bool, int]]
) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for is_take, count in moves:
        if is_take and count <= pool.num_free:
            taken = pool.take(count)
            assert not set(taken) & set(held)
            held += taken
        elif not is_take:
            pool.give_back(held[:count])
            del held[:count]
        assert pool.num_free + len(held) == num_blocks
        pool.check(num_holds=len(held))


def test_kept_blocks_stay_until_the_empty_ones_are_used_up_then_go_oldest_first() -> None:
    pool = BlockPool(4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    first, second, third = pool.take(3)
    for block_id in (second, first):
        pool.keep(block_id)
    pool.give_back([second, first, third])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 2, 0)
    pool.take(2)
    assert evicted == []
    assert pool.take(2) == [second, first]
    assert evicted == [second, first]
    pool.check(num_holds=4)


def test_a_kept_block_may_be_shared_and_is_free_when_the_last_gives_it_back() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.keep(block_id)
    pool.give_back([block_id])
    pool.share([block_id])
    pool.share([block_id])
    pool.give_back([block_id])
    assert pool.is_held(block_id)
    pool.give_back([block_id])
    assert not pool.is_held(block_id)
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_an_empty_block_can_be_neither_shared_nor_kept() -> None:
    pool = BlockPool(2)
    with pytest.raises(BlockAccountingError, match="block 0 is shared but it is empty"):
        pool.share([0])
    with pytest.raises(BlockAccountingError, match="block 0 is to be kept but nobody holds it"):
        pool.keep(0)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_dropped_block_is_empty_as_soon_as_nobody_holds_it(is_held: bool) -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.keep(block_id)
    if is_held:
        pool.drop(block_id)
        pool.give_back([block_id])
    else:
        pool.give_back([block_id])
        pool.drop(block_id)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check(num_holds=0)
