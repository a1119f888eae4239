"""A tree of token texts with values at some of them: finds what a new text begins with. Edges are runs of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from moeflux.runtime.snapshot import Tokens, common_length

V = TypeVar("V")


@dataclass(eq=False)
class _Node(Generic[V]):
    edge: Tokens  # from the parent to here
    value: V | None = None
    children: dict[int, _Node[V]] = field(default_factory=dict)  # by the first token of their edge


class PrefixTree(Generic[V]):
    def __init__(self) -> None:
        self._root: _Node[V] = _Node(np.empty(0, dtype=np.int32))
        self._n = 0

    def put(self, tokens: Tokens, value: V) -> None:
        """Under exactly these tokens, in place of what was there."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = node.children[int(tokens[at])] = _Node(tokens[at:].copy())
            common = common_length(child.edge, tokens[at:])
            if common < len(child.edge):
                child = _split(node, child, common)
            node, at = child, at + common
        self._n += node.value is None
        node.value = value

    def get(self, tokens: Tokens) -> V | None:
        node, at = self._walk(tokens)[-1]
        return node.value if at == len(tokens) else None

    def remove(self, tokens: Tokens) -> V | None:
        path = self._walk(tokens)
        node, at = path[-1]
        if at != len(tokens):
            return None
        value, node.value = node.value, None
        self._n -= value is not None
        for (parent, _), (child, _) in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
            if child.value is not None or len(child.children) > 1:
                break
            _join(parent, child)
        return value

    def prefixes(self, tokens: Tokens) -> list[tuple[int, V]]:
        """Lengths and values of all texts in the tree that these tokens begin with, shortest first."""
        return [(at, node.value) for node, at in self._walk(tokens) if node.value is not None]

    def nearest(self, tokens: Tokens) -> tuple[int, V] | None:
        """A text that has the most tokens in common with these, and how many."""
        node, at = self._walk(tokens)[-1]
        child = node.children.get(int(tokens[at])) if at < len(tokens) else None
        if child is not None:
            at += common_length(child.edge, tokens[at:])
            node = child
        value = next(self._values(node), None)
        return None if value is None else (at, value)

    def __len__(self) -> int:
        """From any thread."""
        return self._n

    def __iter__(self) -> Iterator[V]:
        return self._values(self._root)

    def _walk(self, tokens: Tokens) -> list[tuple[_Node[V], int]]:
        """The nodes that these tokens pass, with the number of tokens up to each."""
        node, at = self._root, 0
        path = [(node, at)]
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None or common_length(child.edge, tokens[at:]) < len(child.edge):
                break
            node, at = child, at + len(child.edge)
            path.append((node, at))
        return path

    def _values(self, node: _Node[V]) -> Iterator[V]:
        todo = [node]
        while todo:
            node = todo.pop()
            if node.value is not None:
                yield node.value
            todo += node.children.values()


def _split(parent: _Node[V], child: _Node[V], at: int) -> _Node[V]:
    """A node within the edge to `child`."""
    middle: _Node[V] = _Node(child.edge[:at])
    parent.children[int(child.edge[0])] = middle
    child.edge = child.edge[at:]
    middle.children[int(child.edge[0])] = child
    return middle


def _join(parent: _Node[V], child: _Node[V]) -> None:
    """Take out a node without a value that has one child or none."""
    first = int(child.edge[0])
    if not child.children:
        del parent.children[first]
        return
    (grandchild,) = child.children.values()
    grandchild.edge = np.concatenate([child.edge, grandchild.edge])
    parent.children[first] = grandchild
