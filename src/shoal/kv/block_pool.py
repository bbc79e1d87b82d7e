"""The pool of KV blocks: which are free, which are kept in the cache, and who holds the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class BlockAccountingError(Exception):
    """Blocks were taken or given back in a way that the pool's books don't allow."""


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1` and takes them back.

    A block that nobody holds (ref_count 0) is either empty or cached: marked by `keep`, its content
    may be of use again. Empty blocks are handed out first, the one that came back last before the
    others, since its memory is the likeliest to be in a CPU cache. Then cached blocks are evicted,
    the one that has been unheld for longest first.

    Attributes:
        on_evict: called with the id of a cached block that is about to be handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._kept: set[int] = set()  # held or not
        self._evictable: dict[int, None] = {}  # kept and unheld, the oldest first
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds: empty or cached."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that keep their content until they are needed."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def is_held(self, block_id: int) -> bool:
        """Whether somebody holds the block."""
        return self._ref_counts[block_id] > 0

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks; their content is undefined.

        Raises:
            BlockAccountingError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise BlockAccountingError(f"{count} blocks asked for, {self.num_free} are free")
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that are held already or cached, once more each.

        Raises:
            BlockAccountingError: one of them is empty.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._evictable:
                    raise BlockAccountingError(f"block {block_id} is shared but it is empty")
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Drop one hold on each block; one that nobody holds any more becomes empty or cached.

        Raises:
            BlockAccountingError: nobody holds one of the blocks.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise BlockAccountingError(f"block {block_id} is given back but nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._kept:
                self._evictable[block_id] = None
            else:
                self._empty.append(block_id)

    def keep(self, block_id: int) -> None:
        """Let a held block stay in the cache when nobody holds it any more."""
        if self._ref_counts[block_id] == 0:
            raise BlockAccountingError(f"block {block_id} is to be kept but nobody holds it")
        self._kept.add(block_id)

    def drop(self, block_id: int) -> None:
        """Undo `keep`: an unheld block becomes empty at once, a held one when it comes back."""
        self._kept.discard(block_id)
        if block_id in self._evictable:
            del self._evictable[block_id]
            self._empty.append(block_id)

    def check(self, num_holds: int) -> None:
        """Go through the books: empty + cached + held = total, and the holds are the callers'.

        Raises:
            BlockAccountingError: the books don't add up.
        """
        unheld = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        if len(unheld) != self.num_free or {*self._empty, *self._evictable} != unheld:
            raise BlockAccountingError(
                f"{len(self._empty)} blocks are empty and {len(self._evictable)} cached, "
                f"{len(unheld)} of {self.num_blocks} are held by nobody"
            )
        if self._kept & unheld != set(self._evictable):
            raise BlockAccountingError("the cached blocks aren't those that were to be kept")
        if sum(self._ref_counts) != num_holds:
            raise BlockAccountingError(
                f"the pool counts {sum(self._ref_counts)} holds, the block tables {num_holds}"
            )

    def _evict(self) -> int:
        block_id = next(iter(self._evictable))
        del self._evictable[block_id]
        self._kept.remove(block_id)
        if self.on_evict is not None:
            self.on_evict(block_id)
        return block_id
