"""Boxes in a tensor: what a chunk covers, and whether chunks cover all of it once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

_MOST_DIVIDED = 6


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and its size there."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def common(self, other: "Box") -> "Box | None":
        """What both cover; ``None`` if nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where it is in ``outer``, as an index."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def cover_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether ``boxes`` cover every element of a tensor of ``shape`` exactly once, and nothing outside.

    By their corners: counted with the sign of the corner, those of a tiling cancel out, up to the whole's own. (The
    mixed derivative of how often a point is covered; it tells two different coverings apart.)
    """
    outer = whole(shape)
    boxes = [box for box in boxes if box.numel]
    if not outer.numel:
        return not boxes
    divided = [d for d, size in enumerate(shape) if any((box.offset[d], box.shape[d]) != (0, size) for box in boxes)]
    if not divided:
        return len(boxes) == 1
    if len(divided) > _MOST_DIVIDED:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(-1, outer), *((1, box) for box in boxes)]:
        for ends in product((0, 1), repeat=len(divided)):
            corner = tuple(box.offset[d] + end * box.shape[d] for d, end in zip(divided, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return not any(corners.values())
