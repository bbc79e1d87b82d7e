"""Which blocks of a prompt's beginning are found, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.kv.manager import KVCacheManager
from shoal.request import Request, SamplingParams

BLOCK = 4
SALT = ("salt", "")


def request(name: str, tokens: list[int], scope: tuple[str, str] | None = SALT, **params: Any):
    return Request(
        name, tokens, SamplingParams(**params), max_tokens=100, seed=0, cache_scope=scope
    )


def start(kv_cache: KVCacheManager, request: Request) -> None:
    kv_cache.start(request, kv_cache.get_computed_blocks(request))


def compute(kv_cache: KVCacheManager, request: Request, num_tokens: int) -> None:
    assert kv_cache.allocate_slots(request, num_tokens)
    request.num_computed_tokens += num_tokens
    kv_cache.publish(request)
    kv_cache.check()


def run(kv_cache: KVCacheManager, request: Request) -> list[int]:
    """Compute a request to its end; returns its blocks."""
    start(kv_cache, request)
    compute(kv_cache, request, request.num_tokens - request.num_computed_tokens)
    blocks = list(kv_cache.block_table(request))
    kv_cache.free(request)
    kv_cache.check()
    return blocks


def found(kv_cache: KVCacheManager, request: Request) -> list[int]:
    return list(kv_cache.get_computed_blocks(request).block_ids)


@pytest.mark.parametrize(
    ("length", "num_found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (14, 3)]
)
def test_full_blocks_are_found_but_the_last_token_is_left_to_compute(
    length: int, num_found: int
) -> None:
    kv_cache = KVCacheManager(8, BLOCK)
    blocks = run(kv_cache, request("a", list(range(14))))
    assert found(kv_cache, request("b", list(range(length)))) == blocks[:num_found]


def test_the_longest_common_beginning_is_found() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    blocks = run(kv_cache, request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert found(kv_cache, request("b", [1, 2, 3, 4, 5, 6, 7, 0, 9])) == blocks[:1]
    assert found(kv_cache, request("c", [0, 2, 3, 4, 5, 6, 7, 8, 9])) == []


def test_equal_blocks_behind_other_beginnings_are_not_mixed_up() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    same = [7, 7, 7, 7]
    a = run(kv_cache, request("a", [1, 1, 1, 1, *same, 0]))
    b = run(kv_cache, request("b", [2, 2, 2, 2, *same, 0]))
    assert a[1] != b[1]
    assert found(kv_cache, request("c", [2, 2, 2, 2, *same, 5])) == b[:2]
    assert found(kv_cache, request("d", [*same, *same, 5])) == []


@pytest.mark.parametrize("scope", [("salt", "A"), ("request", ""), ("request", "a"), None])
def test_scopes_of_another_kind_or_name_share_nothing(scope: tuple[str, str] | None) -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    tokens = list(range(9))
    run(kv_cache, request("a", tokens))
    run(kv_cache, request("b", tokens, ("request", "A")))
    assert found(kv_cache, request("c", tokens, scope)) == []


def test_a_request_for_prompt_logprobs_finds_nothing_and_leaves_its_blocks_to_others() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    tokens = list(range(9))
    blocks = run(kv_cache, request("a", tokens, prompt_logprobs=0))
    assert found(kv_cache, request("b", tokens, prompt_logprobs=0)) == []
    assert found(kv_cache, request("c", tokens)) == blocks[:2]


def test_what_is_found_is_held_by_all_who_use_it() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    tokens = list(range(9))
    run(kv_cache, request("a", tokens))
    b, c = request("b", tokens), request("c", tokens)
    for r in (b, c):
        start(kv_cache, r)
        assert r.num_computed_tokens == 8
        compute(kv_cache, r, 1)
    assert kv_cache.num_used_blocks == 2 + 1 + 1
    kv_cache.free(b)
    assert kv_cache.num_used_blocks == 2 + 1
    kv_cache.free(c)
    assert (kv_cache.num_used_blocks, kv_cache.num_cached_blocks) == (0, 2)
    assert kv_cache.num_free_blocks == 16


def test_asking_holds_nothing() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    run(kv_cache, request("a", list(range(9))))
    found(kv_cache, request("b", list(range(9))))
    assert kv_cache.num_used_blocks == 0


def test_blocks_that_are_being_computed_are_announced_and_then_found() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    a, b = request("a", list(range(12))), request("b", list(range(9)))
    start(kv_cache, a)
    assert kv_cache.get_computed_blocks(b).is_being_computed
    compute(kv_cache, a, 5)
    match = kv_cache.get_computed_blocks(b)
    assert match.is_being_computed
    assert list(match.block_ids) == list(kv_cache.block_table(a)[:1])
    compute(kv_cache, a, 3)
    match = kv_cache.get_computed_blocks(b)
    assert not match.is_being_computed
    assert list(match.block_ids) == list(kv_cache.block_table(a)[:2])


def test_what_was_announced_and_never_computed_is_not_waited_for() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    a, b = request("a", list(range(13))), request("b", list(range(13)))
    start(kv_cache, a)
    compute(kv_cache, a, 6)
    first = list(kv_cache.block_table(a)[:1])
    assert kv_cache.get_computed_blocks(b).is_being_computed
    kv_cache.free(a)
    match = kv_cache.get_computed_blocks(b)
    assert (list(match.block_ids), match.is_being_computed) == (first, False)


def test_the_blocks_of_the_output_are_found_too() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    a = request("a", [1, 2, 3])
    start(kv_cache, a)
    compute(kv_cache, a, 3)
    for token_id in (4, 5, 6, 7, 8):
        a.output_token_ids.append(token_id)
        compute(kv_cache, a, 1)
    kv_cache.free(a)
    assert len(found(kv_cache, request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]))) == 2


def test_memory_is_taken_from_the_sequence_unused_for_longest_its_end_first() -> None:
    kv_cache = KVCacheManager(6, BLOCK)
    old, new = [1] * 8 + [0], [2] * 8 + [0]
    run(kv_cache, request("old", old))
    run(kv_cache, request("new", new))
    assert kv_cache.num_cached_blocks == 4
    run(kv_cache, request("other", [3] * 11))  # needs 3 blocks, 2 are empty
    assert len(found(kv_cache, request("a", old))) == 1
    assert len(found(kv_cache, request("b", new))) == 2
    run(kv_cache, request("another", [4] * 7))  # needs 2 blocks, 1 is empty
    assert found(kv_cache, request("a", old)) == []
    assert len(found(kv_cache, request("b", new))) == 2


def test_use_makes_blocks_young_again() -> None:
    kv_cache = KVCacheManager(6, BLOCK)
    old, new = [1] * 8 + [0], [2] * 8 + [0]
    run(kv_cache, request("old", old))
    run(kv_cache, request("new", new))
    run(kv_cache, request("old again", old))
    run(kv_cache, request("other", [3] * 15))  # needs 4 blocks, 2 are empty
    assert len(found(kv_cache, request("a", old))) == 2
    assert found(kv_cache, request("b", new)) == []


def test_blocks_in_use_are_never_evicted() -> None:
    kv_cache = KVCacheManager(4, BLOCK)
    a = request("a", list(range(9)))
    start(kv_cache, a)
    compute(kv_cache, a, 9)
    assert not kv_cache.allocate_slots(request("b", [1] * 8), 8)
    assert kv_cache.allocate_slots(request("c", [1] * 4), 4)


def test_a_reset_forgets_everything_and_running_requests_keep_their_blocks() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    run(kv_cache, request("done", [1] * 9))
    running, waiting = request("running", list(range(13))), request("waiting", list(range(13)))
    start(kv_cache, running)
    compute(kv_cache, running, 6)
    assert kv_cache.get_computed_blocks(waiting).is_being_computed
    assert kv_cache.reset_prefix_cache() == 2 + 1
    match = kv_cache.get_computed_blocks(waiting)
    assert (list(match.block_ids), match.is_being_computed) == ([], False)
    assert found(kv_cache, request("done again", [1] * 9)) == []
    compute(kv_cache, running, 7)
    kv_cache.free(running)
    kv_cache.check()
    assert (kv_cache.num_free_blocks, kv_cache.num_cached_blocks) == (16, 0)
    assert kv_cache.reset_prefix_cache() == 0


def test_after_a_reset_prompts_are_cached_anew() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    run(kv_cache, request("a", list(range(9))))
    kv_cache.reset_prefix_cache()
    blocks = run(kv_cache, request("b", list(range(9))))
    assert found(kv_cache, request("c", list(range(9)))) == blocks[:2]


def test_two_who_compute_the_same_leave_one_copy() -> None:
    kv_cache = KVCacheManager(16, BLOCK)
    a, b = (request(name, list(range(9)), prompt_logprobs=0) for name in "ab")
    for r in (a, b):
        start(kv_cache, r)
    for r in (a, b):
        compute(kv_cache, r, 9)
        kv_cache.free(r)
    assert kv_cache.num_cached_blocks == 2
    kv_cache.check()
