"""Which KV blocks each request holds: taken as its tokens are computed, returned when it ends."""

from __future__ import annotations

from array import array

from shoal.config import BLOCK_SIZE
from shoal.kv.block_pool import BlockPool
from shoal.kv.prefix_cache import NO_MATCH, PrefixCache, PrefixMatch
from shoal.request import Request


class KVCacheManager:
    """The block tables of all requests over one `BlockPool`.

    The block at index i of a request's table holds its positions `i * block_size` to
    `(i + 1) * block_size - 1`. Full blocks go into the prefix cache as they are computed and stay
    there, unheld, until their memory is needed.
    """

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool, block_size)
        self._tables: dict[str, array[int]] = {}  # int32, as the runtime reads them

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached or not."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request holds and that a prompt may find again."""
        return self._pool.num_cached

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` occupies."""
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, request: Request, match: PrefixMatch = NO_MATCH) -> int:
        """Free blocks that the tokens known so far need.

        Those that the request holds are there, and so are those of a match that others hold.
        """
        num_held = sum(map(self._pool.is_held, match.block_ids))
        return self.blocks_for(request.num_tokens) - len(self.block_table(request)) - num_held

    def room_for(self, request: Request) -> int:
        """Tokens that the request could compute next with its own and the free blocks."""
        num_reachable = len(self.block_table(request)) + self._pool.num_free
        return num_reachable * self.block_size - request.num_computed_tokens

    def get_computed_blocks(self, request: Request) -> PrefixMatch:
        """The cached blocks of a request that doesn't run; nothing is held by asking."""
        return self._cache.match(request)

    def start(self, request: Request, match: PrefixMatch) -> None:
        """Let a request begin behind the matched blocks; sets its `num_computed_tokens`."""
        if match.block_ids:
            self._pool.share(match.block_ids)
            self._tables[request.request_id] = array("i", match.block_ids)
        request.num_computed_tokens = len(match.block_ids) * self.block_size
        self._cache.start(request)

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Make the block table reach `num_tokens` beyond `request.num_computed_tokens`.

        Takes only the blocks that are missing. Returns False, having taken nothing, when too few
        are free.
        """
        table = self.block_table(request)
        missing = self.blocks_for(request.num_computed_tokens + num_tokens) - len(table)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            self._tables[request.request_id] = table
            table.extend(self._pool.take(missing))
        return True

    def publish(self, request: Request) -> None:
        """Let others find the full blocks that the request has computed."""
        self._cache.publish(request, self._tables.get(request.request_id, ()))

    def block_table(self, request: Request) -> array[int]:
        """The ids of the request's blocks in the order of its tokens; borrowed, not a copy."""
        table = self._tables.get(request.request_id)
        return array("i") if table is None else table

    def free(self, request: Request) -> None:
        """Return all blocks of the request, if it holds any."""
        self._cache.stop(request)
        # Last block first: the pool hands empty ones out again in their old order, and evicts the
        # end of a sequence before its beginning, which more requests may share.
        self._pool.give_back(reversed(self._tables.pop(request.request_id, ())))

    def reset_prefix_cache(self) -> int:
        """Forget all computed blocks; returns how many. Requests keep those that they hold."""
        return self._cache.reset()

    def check(self) -> None:
        """Compare the tables with the pool's books; linear in the number of blocks.

        Raises:
            BlockAccountingError: they don't agree.
        """
        self._pool.check(sum(len(table) for table in self._tables.values()))
