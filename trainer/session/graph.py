"""The operators of an autograd graph, from a loss down."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


def operators(root: Any) -> Iterator[Any]:
    """Each operator once, those next to ``root`` first; none where there is no graph."""
    queue, seen = deque([root]), {root}
    while queue:
        node = queue.popleft()
        if node is None:
            continue
        yield node
        for one, _ in node.next_functions:
            if one not in seen:
                seen.add(one)
                queue.append(one)
