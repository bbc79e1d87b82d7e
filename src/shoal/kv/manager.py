"""Which KV blocks each request holds: taken as its tokens are computed, returned when it ends."""

from __future__ import annotations

from shoal.config import BLOCK_SIZE
from shoal.kv.block_pool import BlockPool
from shoal.request import Request


class KVCacheManager:
    """The block tables of all requests over one `BlockPool`.

    The block at index i of a request's table holds its positions `i * block_size` to
    `(i + 1) * block_size - 1`.
    """

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` occupies."""
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, request: Request) -> int:
        """Blocks that the tokens known so far need beyond those that the request holds."""
        return self.blocks_for(request.num_tokens) - len(self.block_table(request))

    def room_for(self, request: Request) -> int:
        """Tokens that the request could compute next with its own and the free blocks."""
        num_reachable = len(self.block_table(request)) + self._pool.num_free
        return num_reachable * self.block_size - request.num_computed_tokens

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

    def block_table(self, request: Request) -> list[int]:
        """The ids of the request's blocks in the order of its tokens; borrowed, not a copy."""
        return self._tables.get(request.request_id) or []

    def free(self, request: Request) -> None:
        """Return all blocks of the request, if it holds any."""
        # Last block first: the pool then hands them out again in their old order.
        self._pool.give_back(reversed(self._tables.pop(request.request_id, [])))

    def check(self) -> None:
        """Compare the tables with the pool's books; linear in the number of blocks.

        Raises:
            BlockAccountingError: they don't agree.
        """
        self._pool.check(sum(len(table) for table in self._tables.values()))
