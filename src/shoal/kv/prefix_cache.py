"""Prefix caching: finding the KV blocks of a prompt's beginning that are there already.

Full blocks form a tree, as in a chain of block hashes: a block is known by the block before it and
its own 16 tokens, the first of a sequence by its scope and its tokens. The key holds the tokens
themselves, so a hit is always compared with what was computed and a colliding hash can't give
another prompt's block. Keys and values of a token depend on the tokens before it alone, bit for
bit, so a hit never changes an answer.

A scope says who shares: ("salt", the request's cache_salt), or ("request", its id) where only the
samples of one request do. The tag keeps the kinds apart.

A block is also known while a running request is still computing it, so that others with the same
prefix can wait for it instead of computing it again beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.config import BLOCK_SIZE
from shoal.kv.block_pool import BlockPool
from shoal.request import Request

Scope = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Node:
    """A full block of some sequence.

    `block_id` is None while `owner` computes it. `is_gone` is set once it can't be found any more.
    """

    key: tuple[int | Scope, tuple[int, ...]]  # the parent's number or the scope; the tokens
    number: int
    owner: str
    block_id: int | None = None
    is_gone: bool = False


@dataclass(slots=True)
class _Branch:
    """The blocks of a running request, in the order of its tokens."""

    nodes: list[_Node] = field(default_factory=list)
    num_published: int = 0  # blocks from the start that it has computed and taken in


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache has of a sequence: the blocks of its longest known beginning."""

    block_ids: Sequence[int] = ()
    is_being_computed: bool = False  # the block behind these will be there soon


NO_MATCH = PrefixMatch()


@dataclass(slots=True)
class PrefixCache:
    """The tree of known blocks over a pool, and the branch of each running request."""

    pool: BlockPool
    block_size: int = BLOCK_SIZE
    _nodes: dict[tuple[int | Scope, tuple[int, ...]], _Node] = field(default_factory=dict)
    _node_of_block: dict[int, _Node] = field(default_factory=dict)
    _branches: dict[str, _Branch] = field(default_factory=dict)
    _awaited: dict[str, _Node] = field(default_factory=dict)  # by the requests that wait for it
    _matched: dict[str, list[_Node]] = field(default_factory=dict)  # of waiting requests
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.pool.on_evict = self.evict

    def match(self, request: Request) -> PrefixMatch:
        """The known blocks of the request's beginning.

        At least its last token is left to compute, since sampling needs its logits. A request for
        prompt logprobs needs those of every token and finds nothing.
        """
        if request.cache_scope is None or request.sampling_params.prompt_logprobs is not None:
            return NO_MATCH
        request_id = request.request_id
        awaited = self._awaited.get(request_id)
        if awaited is not None and awaited.block_id is None and not awaited.is_gone:
            return PrefixMatch(is_being_computed=True)
        # A request that waits long is asked for in every step: go on where the last time ended.
        nodes = self._matched.get(request_id, [])
        if any(node.is_gone for node in nodes):
            nodes = []
        awaited = self._walk(request, nodes)
        self._matched[request_id] = nodes
        if awaited is None:
            self._awaited.pop(request_id, None)
        else:
            self._awaited[request_id] = awaited
        block_ids = [node.block_id for node in nodes if node.block_id is not None]
        return PrefixMatch(block_ids, is_being_computed=awaited is not None)

    def _walk(self, request: Request, nodes: list[_Node]) -> _Node | None:
        """Extend known nodes as far as the tree goes; returns one that is just being computed."""
        parent = nodes[-1].number if nodes else request.cache_scope
        assert parent is not None  # only requests with a scope are matched
        while len(nodes) < (request.num_tokens - 1) // self.block_size:
            node = self._nodes.get((parent, self._tokens(request, len(nodes))))
            if node is None or node.block_id is None:
                return node
            nodes.append(node)
            parent = node.number
        return None

    def start(self, request: Request) -> None:
        """Follow a request that starts to run; announces the blocks that it is going to compute."""
        self._matched.pop(request.request_id, None)
        if request.cache_scope is not None:
            self._branches[request.request_id] = _Branch()
            self._extend(request, request.num_tokens // self.block_size)

    def publish(self, request: Request, block_table: Sequence[int]) -> None:
        """Take in the full blocks that the request has computed since the last time."""
        branch = self._branches.get(request.request_id)
        num_full = request.num_computed_tokens // self.block_size
        if branch is None or branch.num_published == num_full:
            return
        self._extend(request, num_full)
        for node, block_id in zip(
            branch.nodes[branch.num_published : num_full],
            block_table[branch.num_published : num_full],
            strict=False,  # a branch that has lost its parent ends early
        ):
            if node.owner == request.request_id and node.block_id is None and not node.is_gone:
                node.block_id = block_id
                self._node_of_block[block_id] = node
                self.pool.keep(block_id)
        branch.num_published = num_full

    def stop(self, request: Request) -> None:
        """Forget a request that stops running, and what it announced but did not compute."""
        self._awaited.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        branch = self._branches.pop(request.request_id, None)
        for node in branch.nodes if branch is not None else ():
            if node.block_id is None and node.owner == request.request_id:
                self._remove(node)

    def evict(self, block_id: int) -> None:
        """Forget a block whose memory is needed."""
        self._remove(self._node_of_block.pop(block_id))

    def reset(self) -> int:
        """Forget everything; returns how many blocks. Those in use are freed with their holders."""
        num_blocks = len(self._node_of_block)
        for block_id in self._node_of_block:
            self.pool.drop(block_id)
        for known in (
            self._nodes,
            self._node_of_block,
            self._branches,
            self._awaited,
            self._matched,
        ):
            known.clear()
        return num_blocks

    def _extend(self, request: Request, length: int) -> None:
        """Make the branch `length` blocks long, or drop it when its end can't be found any more."""
        nodes = self._branches[request.request_id].nodes
        parent = nodes[-1].number if nodes else request.cache_scope
        assert parent is not None  # only requests with a scope have a branch
        while len(nodes) < length:
            if nodes and nodes[-1].is_gone:
                del self._branches[request.request_id]
                return
            key = (parent, self._tokens(request, len(nodes)))
            node = self._nodes.get(key)
            if node is None:
                node = _Node(key, next(self._numbers), request.request_id)
                self._nodes[key] = node
            nodes.append(node)
            parent = node.number

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(request.token_ids(start, start + self.block_size))

    def _remove(self, node: _Node) -> None:
        node.is_gone = True
        del self._nodes[node.key]
