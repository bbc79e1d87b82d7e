"""The pool of KV blocks: which are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAccountingError(Exception):
    """Blocks were taken or given back in a way that the pool's books don't allow."""


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1` and takes them back.

    A block is free exactly when its ref_count is 0. The block that came back last is handed out
    first: its memory is the likeliest to be in a CPU cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks.

        Raises:
            BlockAccountingError: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise BlockAccountingError(f"{count} blocks asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Drop one hold on each block; a block that nobody holds any more becomes free.

        Raises:
            BlockAccountingError: nobody holds one of the blocks.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise BlockAccountingError(f"block {block_id} is given back but nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check(self, num_holds: int) -> None:
        """Go through the books: free + held = total, and the holds are those that callers know of.

        Raises:
            BlockAccountingError: the books don't add up.
        """
        unheld = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        if len(self._free) != len(unheld) or set(self._free) != unheld:
            raise BlockAccountingError(
                f"{len(self._free)} blocks are on the free list, "
                f"{len(unheld)} of {self.num_blocks} are held by nobody"
            )
        if sum(self._ref_counts) != num_holds:
            raise BlockAccountingError(
                f"the pool counts {sum(self._ref_counts)} holds, the block tables {num_holds}"
            )
