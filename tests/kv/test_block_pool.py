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
