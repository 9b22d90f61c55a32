"""INT48 between operators: three 16-bit words, the lowest first, in a node of INT16 with one more axis at its end.

That is TOSA's packed form (six bytes, little-endian), so parameters, constants and results need no conversion, and no
kernel has to know 64-bit integers, which the CPU plugin narrows to 32. An INT48 value always lies in TOSA's axis order.
TOSA 1.0, section 1.8 (number formats).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import Wide, as_i32, low_bits, shifted_left, shifted_right, wrapped
from virtaccel.backend_openvino.lowering.registry import Layout, Site, Value
from virtaccel.tosa_graph.graph import DType

WORDS = 3


class Term(NamedTuple):
    """An INT32 node that counts 2^shift times."""

    node: ov.Output
    shift: int


def words(packed: ov.Output) -> Wide:
    """The words of an INT48 node as INT32: two unsigned ones and the signed highest."""
    low, middle, high = (
        ops.gather(packed, np.array(index, np.int64), np.array(-1, np.int64)).output(0) for index in range(WORDS)
    )
    return Wide(low_bits(as_i32(low), 16), low_bits(as_i32(middle), 16), as_i32(high))


def total(terms: Iterable[Term]) -> Wide:
    """The sum of terms, modulo 2^48. Words are not carried yet; there may be a few thousand terms."""
    sums: list[ov.Output | None] = [None] * WORDS

    def add(word: int, part: ov.Output) -> None:
        if word < WORDS:
            known = sums[word]
            sums[word] = part if known is None else ops.add(known, part).output(0)

    for node, shift in terms:
        first, rest = divmod(shift, 16)
        for word, half in ((first, low_bits(node, 16)), (first + 1, shifted_right(node, 16))):
            moved = shifted_left(half, rest) if rest else half
            add(word, low_bits(moved, 16))
            add(word + 1, shifted_right(moved, 16))
    some = next(part for part in sums if part is not None)
    nothing = ops.bitwise_xor(some, some).output(0)
    low, middle, high = (nothing if part is None else part for part in sums)
    return Wide(low, middle, high)


def plus(one: Wide, other: Wide) -> Wide:
    """The sum; words are not carried yet, the operands broadcast."""
    return Wide(*(ops.add(a, b).output(0) for a, b in zip(one, other, strict=True)))


def value(site: Site, wide: Wide, layout: Layout) -> Value:
    """The site's INT48 result from words that lie in `layout`; bits above the 48th are dropped."""
    middle = ops.add(wide.middle, shifted_right(wide.low, 16)).output(0)
    high = ops.add(wide.high, shifted_right(middle, 16)).output(0)
    shape = site.out_shapes[0]
    last = np.array([*axes.stored(shape, layout), 1], np.int64)
    pieces = [
        ops.reshape(ops.convert(wrapped(word, 16), ov.Type.i16), last, special_zero=False)
        for word in (wide.low, middle, high)
    ]
    node = ops.concat(pieces, -1).output(0)
    order = (*axes.permutation(layout, axes.identity(len(shape))), len(shape))
    if order != axes.identity(len(order)):
        node = ops.transpose(node, np.array(order, np.int64)).output(0)
    return site.builder.value(node, DType.INT48, shape)
