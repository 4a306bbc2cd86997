"""A head that drafts token by token grows trees on a GPU: all levels in one recording.

Each pass after the first reads all nodes so far anew, since in attention a node's ancestors must stand in its
own pass; a head is small, and few rows more cost it little. Invariant: nodes lie behind the text in the
head's cache, in the order of their numbers, and are overwritten when the text goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cuda.attention import Attending
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.recorded_head import HeadShape
from paceline.cuda.top import top
from paceline.cuda.tree_nodes import TreeNodes, grow, lay_out


class TreeDraft:
    """What launches the passes, and what they read and write."""

    def __init__(self, head: CudaChainHead, shape: HeadShape) -> None:
        """shape: of the first pass, and the tree's."""
        assert shape.tree is not None, "a tree"
        self._head, self.shape, requests, device = head, shape.tree, shape.bucket.requests, head.device
        self._first, self.buffer = head.prepare(shape)
        self.nodes = TreeNodes.of(shape.tree, requests, device)
        size = (shape.tree.depth, requests, shape.tree.width, head.config.hidden_size)
        self._features = torch.zeros(size, dtype=head.dtype, device=device)  # what each node goes on from
        each = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self._starts = [shape.tree.width * level * each for level in range(shape.tree.depth)]

    def __call__(self) -> TreeNodes:
        head, at, (width, depth, _) = self._head, self.buffer.on_device, self.shape
        logits, outputs = self._first()
        lay_out(self.nodes, at, self.shape, head.trash_slot)
        for level in range(depth):
            if level:
                logits, outputs = self._read(level)
            grow(self.nodes, top(logits, at, head.ids, level, width), level, self.shape)
            if level + 1 < depth:
                newest = self._features[level].flatten(0, 1)
                torch.index_select(outputs, 0, self.nodes.sources, out=newest)
        return self.nodes

    def _read(self, level: int) -> tuple[Tensor, Tensor]:
        """Logits and outputs after the newest of the nodes of that many levels."""
        nodes, (width, _, _) = self.nodes, self.shape
        count = width * level
        columns = (nodes.tokens, nodes.positions, nodes.slots, nodes.masks)
        tokens, positions, slots, masks = (each[:, :count].flatten() for each in columns)
        tables, starts = self.buffer.on_device["block_tables"], self._starts[level]
        batch = DeviceBatch(tokens, positions, slots, starts, nodes.ends, tables, masks[:, None])
        features = self._features[:level].transpose(0, 1).flatten(0, 2)[None]  # of one request no copy
        return self._head.read_on(batch, features, Attending(self._head.scale, count), width)
