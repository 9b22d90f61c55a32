"""Shapes and ERROR_IF rules of the windowed and product operators: convolutions, pooling, MATMUL, FFT, RESIZE.

Sections 2.2 (tensor operators) and 2.11 (image operators) of TOSA 1.0. Each function takes a Node and returns the
shapes its results must have. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtaccel.tosa_graph.graph import DType, TosaError
from virtaccel.tosa_graph.node import UNKNOWN, Dims, Node, require, same
from virtaccel.tosa_graph.schema import ResizeMode

_RESIZE_MAX = 16384
_RESIZE_TYPES = {
    (ResizeMode.BILINEAR, DType.INT8): DType.INT32,
    (ResizeMode.BILINEAR, DType.INT16): DType.INT48,
}


def windows(extent: int, before: int, after: int, span: int, stride: int) -> int:
    """How many windows of `span` fit a padded extent, which they must fill exactly (idiv_check)."""
    if UNKNOWN in (extent, span):
        return UNKNOWN
    rest = extent + before + after - span
    require(rest >= 0, "the kernel is larger than the padded input")
    require(rest % stride == 0, "stride does not divide the padded input less the kernel")
    return rest // stride + 1


def _positive(node: Node, values: Sequence[int], name: str, maximum: int, maximum_name: str) -> None:
    require(min(values) >= 1, f"{name} must be at least 1")
    _bounded(node, values, name, maximum, maximum_name)


def _bounded(node: Node, values: Sequence[int], name: str, maximum: int, maximum_name: str) -> None:
    if max(values) > maximum:
        raise TosaError(f"{name} exceeds {maximum_name} {maximum} of level {node.level.name}")


def _padding(node: Node, axes: int) -> Dims:
    pad = node.numbers("pad", 2 * axes)
    require(min(pad) >= 0, "pad must not be negative")
    _bounded(node, pad, "pad", node.level.max_kernel, "MAX_KERNEL")
    return pad


def _strides(node: Node, axes: int) -> Dims:
    stride = node.numbers("stride", axes)
    _positive(node, stride, "stride", node.level.max_stride, "MAX_STRIDE")
    return stride


def _bias(node: Node, channels: int) -> None:
    extent = node.shapes[2][0]
    if extent != channels and extent != 1 and extent != UNKNOWN and channels != UNKNOWN:
        raise TosaError(f"bias has {extent} elements for {channels} output channels")


def _zero_points(node: Node) -> None:
    node.zero_point(3, "input_zp")
    node.zero_point(4, "weight_zp")


def _convolved(node: Node, kernel: Dims) -> Dims:
    """The spatial extents of a convolution's result; `kernel` are the weight's spatial extents."""
    axes = len(kernel)
    pad, stride, dilation = _padding(node, axes), _strides(node, axes), node.numbers("dilation", axes)
    require(min(dilation) >= 1, "dilation must be at least 1")
    known = [d * k for d, k in zip(dilation, kernel, strict=True) if k != UNKNOWN]
    _bounded(node, known or [0], "dilation * kernel", node.level.max_kernel, "MAX_KERNEL")
    spans = [UNKNOWN if k == UNKNOWN else (k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return tuple(
        windows(extent, pad[2 * axis], pad[2 * axis + 1], spans[axis], stride[axis])
        for axis, extent in enumerate(node.shapes[0][1:-1])
    )


def convolution(node: Node) -> tuple[Dims, ...]:
    """CONV2D and CONV3D: [N,(D,)H,W,C] with [OC,(KD,)KH,KW,C]."""
    source, weight = node.shapes[0], node.shapes[1]
    _zero_points(node)
    same("input and weight differ in channels", source[-1], weight[-1])
    _bias(node, weight[0])
    return ((source[0], *_convolved(node, weight[1:-1]), weight[0]),)


def depthwise(node: Node) -> tuple[Dims, ...]:
    """DEPTHWISE_CONV2D: [N,H,W,C] with [KH,KW,C,M]."""
    source, weight = node.shapes[0], node.shapes[1]
    _zero_points(node)
    channels = same("input and weight differ in channels", source[-1], weight[2])
    results = UNKNOWN if UNKNOWN in (channels, weight[3]) else channels * weight[3]
    _bias(node, results)
    return ((source[0], *_convolved(node, weight[:2]), results),)


def transpose_convolution(node: Node) -> tuple[Dims, ...]:
    """TRANSPOSE_CONV2D: [N,H,W,C] with [OC,KH,KW,C]; negative output padding crops."""
    source, weight = node.shapes[0], node.shapes[1]
    _zero_points(node)
    same("input and weight differ in channels", source[-1], weight[-1])
    _bias(node, weight[0])
    stride, pad, kernel = _strides(node, 2), node.numbers("out_pad", 4), weight[1:3]
    _bounded(node, pad, "out_pad", node.level.max_kernel, "MAX_KERNEL")
    _bounded(node, kernel, "kernel", node.level.max_kernel, "MAX_KERNEL")
    spatial = []
    for axis in (0, 1):
        before, after, span, extent = pad[2 * axis], pad[2 * axis + 1], kernel[axis], source[1 + axis]
        if span != UNKNOWN:
            require(min(before, after) > -span, "out_pad must be greater than minus the kernel")
        known = UNKNOWN not in (span, extent)
        spatial.append((extent - 1) * stride[axis] + before + after + span if known else UNKNOWN)
    require(min(spatial) >= 1 or UNKNOWN in spatial, "the result is empty")
    return ((source[0], *spatial, weight[0]),)


def _pooled(node: Node) -> tuple[Dims, ...]:
    kernel, stride, pad = node.numbers("kernel", 2), _strides(node, 2), _padding(node, 2)
    _positive(node, kernel, "kernel", node.level.max_kernel, "MAX_KERNEL")
    require(max(pad[:2]) < kernel[0] and max(pad[2:]) < kernel[1], "pad must be less than the kernel")
    batch, *extents, channels = node.shapes[0]
    spatial = (
        windows(extent, pad[2 * axis], pad[2 * axis + 1], kernel[axis], stride[axis])
        for axis, extent in enumerate(extents)
    )
    return ((batch, *spatial, channels),)


def average_pool(node: Node) -> tuple[Dims, ...]:
    node.zero_point(1, "input_zp")
    node.zero_point(2, "output_zp")
    return _pooled(node)


def max_pool(node: Node) -> tuple[Dims, ...]:
    return _pooled(node)


def matmul(node: Node) -> tuple[Dims, ...]:
    """[N,H,C] with [N,C,W]."""
    left, right = node.shapes[0], node.shapes[1]
    node.zero_point(2, "A_zp")
    node.zero_point(3, "B_zp")
    batch = same("A and B differ in batch", left[0], right[0])
    same("A's columns and B's rows differ", left[2], right[1])
    return ((batch, left[1], right[2]),)


def _transform_extents(node: Node) -> None:
    for extent in node.shapes[0][1:]:
        if extent != UNKNOWN:
            require(extent > 0 and extent & (extent - 1) == 0, "height and width must be powers of two")
            _bounded(node, [extent], "height or width", node.level.max_kernel, "MAX_KERNEL")


def fft(node: Node) -> tuple[Dims, ...]:
    _transform_extents(node)
    real, imaginary = node.shapes
    shape = tuple(same("real and imaginary part differ in shape", a, b) for a, b in zip(real, imaginary, strict=True))
    return (shape, shape)


def real_fft(node: Node) -> tuple[Dims, ...]:
    _transform_extents(node)
    batch, height, columns = node.shapes[0]
    shape = (batch, height, UNKNOWN if columns == UNKNOWN else columns // 2 + 1)
    return (shape, shape)


def resize(node: Node) -> tuple[Dims, ...]:
    """scale is [y numerator, y denominator, x numerator, x denominator], offset and border are [y, x]."""
    mode = node.number("mode")
    require(mode in (ResizeMode.NEAREST, ResizeMode.BILINEAR), f"mode {mode}")
    source, result = node.dtypes[0], node.result_dtypes[0]
    expected = _RESIZE_TYPES.get((ResizeMode(mode), source), source)
    require(result == expected, f"mode {ResizeMode(mode).name} gives {expected.name} for {source.name}")
    for operand, length, name in ((1, 4, "scale"), (2, 2, "offset"), (3, 2, "border")):
        node.fixed(operand, (length,), name)
    batch, height, width, channels = node.shapes[0]
    require(max(height, width) < _RESIZE_MAX, f"height and width must be less than {_RESIZE_MAX}")
    scale, offset, border = node.values[1:4]
    if scale is None or offset is None or border is None:
        return node.declared
    spatial = [
        _resized(node, extent, scale[2 * axis], scale[2 * axis + 1], offset[axis], border[axis])
        for axis, extent in enumerate((height, width))
    ]
    return ((batch, *spatial, channels),)


def _resized(node: Node, extent: int, numerator: int, denominator: int, offset: int, border: int) -> int:
    require(numerator > 0 and denominator > 0, "scale must be positive")
    require(numerator <= 1 << 11, "scale numerator must be at most 2048")
    require(denominator < 16 * numerator, "scale must be more than 1/16")
    require(-numerator <= offset < 16 * numerator, "offset is out of range")
    require(-16 * numerator <= border < numerator, "border is out of range")
    _bounded(node, [numerator // denominator], "scale", node.level.max_scale, "MAX_SCALE")
    if extent == UNKNOWN:
        return UNKNOWN
    rest = (extent - 1) * numerator - offset + border
    require(rest % denominator == 0, "the output size is not a whole number")
    require(rest >= 0, "the result is empty")
    require(rest // denominator + 1 < _RESIZE_MAX, f"height and width must be less than {_RESIZE_MAX}")
    return rest // denominator + 1
