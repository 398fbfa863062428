"""Operators written in terms of others, so that compiled code takes less time on a CPU.

    convolution              the product of a matrix of shifted inputs and the weights
    its backward             two products; the shifted gradients are added
    max_pool2d, backward     the maximum of a few strided views
    addmm                    a product; what is added is fused with what follows
    softmax of attention     one pass for its maximum, one for its sum

Inductor fuses the shifts, maxima and sums with what surrounds them and keeps channels innermost,
which a call into a library does not. Results are the same up to rounding; the gradient of a
maximum goes to its first place, as in PyTorch. What is not listed (strides, groups, dilations,
overlapping windows, wide convolutions) stays as it is: the functions return NotImplemented.
`python bench/peers/run.py --models cnn` shows the effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_ATEN: Final = torch.ops.aten
_MOST_COLUMNS: Final = 1024  # of shifted inputs: beyond that, a library's convolution is faster


def _is_simple(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> bool:
    if weight.dim() != 4 or transposed or groups != 1:
        return False
    outputs, inputs, height, width = weight.shape
    return (
        list(stride) == list(dilation) == [1, 1]
        and padding[0] < height
        and padding[1] < width
        and height * width * max(inputs, outputs) <= _MOST_COLUMNS
    )


def _columns(image: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """A row for each place of the result: the inputs that it is made of, channels innermost."""
    _, channels, height, width = weight.shape
    top, left = padding
    padded = _ATEN.constant_pad_nd(image.permute(0, 2, 3, 1), [0, 0, left, left, top, top])
    rows, places = padded.shape[1] - height + 1, padded.shape[2] - width + 1
    shifted = [padded[:, y : y + rows, x : x + places] for y in range(height) for x in range(width)]
    return torch.cat(shifted, -1).reshape(-1, height * width * channels)


def _as_matrix(weight: Tensor) -> Tensor:
    """A row for each column of `_columns`, a column for each output channel."""
    return weight.permute(2, 3, 1, 0).reshape(-1, weight.shape[0])


def _convolution(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if not _is_simple(weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    columns, matrix = _columns(image, weight, padding), _as_matrix(weight)
    product = columns @ matrix if bias is None else _addmm(bias, columns, matrix)
    height = image.shape[2] + 2 * padding[0] - weight.shape[2] + 1
    width = image.shape[3] + 2 * padding[1] - weight.shape[3] + 1
    return product.view(image.shape[0], height, width, weight.shape[0]).permute(0, 3, 1, 2)


def _convolution_backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    if not _is_simple(weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    outputs, inputs, height, width = weight.shape
    rows = gradient.permute(0, 2, 3, 1).reshape(-1, outputs)
    of_image = of_weight = of_bias = None
    if wanted[0]:
        count, _, tall, wide = gradient.shape
        products = (rows @ _as_matrix(weight).t()).view(count, tall, wide, height * width, inputs)
        of_image = _shifted_sum(products, image, width, padding).permute(0, 3, 1, 2)
    if wanted[1]:
        product = _columns(image, weight, padding).t() @ rows
        of_weight = product.view(height, width, inputs, outputs).permute(3, 2, 0, 1)
    if wanted[2]:
        of_bias = rows.sum(0)
    return of_image, of_weight, of_bias


def _shifted_sum(products: Tensor, image: Tensor, width: int, padding: Sequence[int]) -> Tensor:
    """Adds each product to the place of the image that it came from."""
    tall, wide = products.shape[1:3]
    total: Tensor | None = None
    for number in range(products.shape[3]):
        y, x = number // width - padding[0], number % width - padding[1]
        below, right = image.shape[2] - tall - y, image.shape[3] - wide - x
        part = products[
            :, max(0, -y) : tall + min(0, below), max(0, -x) : wide + min(0, right), number
        ]
        edges = [0, 0, max(0, x), max(0, right), max(0, y), max(0, below)]
        padded: Tensor = _ATEN.constant_pad_nd(part, edges)
        total = padded if total is None else total + padded
    assert total is not None
    return total


def _is_tiling(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> bool:
    """Whether windows neither overlap nor leave the image."""
    return (
        len(kernel) == 2
        and list(stride or kernel) == list(kernel)
        and not any(padding)
        and all(step == 1 for step in dilation)
        and not ceil_mode
    )


def _places(image: Tensor, kernel: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Each place of the windows, and their maximum."""
    high, wide = kernel
    rows, columns = image.shape[2] // high * high, image.shape[3] // wide * wide
    views = [image[:, :, y:rows:high, x:columns:wide] for y in range(high) for x in range(wide)]
    most = views[0]
    for view in views[1:]:
        most = torch.maximum(most, view)
    return views, most


def _max_pool(
    image: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Any:
    if image.dim() != 4 or not _is_tiling(kernel, stride, padding, dilation, ceil_mode):
        return NotImplemented
    views, most = _places(image, kernel)
    width = image.shape[3]
    offset = torch.where(views[0] == most, 0, -1)
    for number, view in enumerate(views):
        inside = number // kernel[1] * width + number % kernel[1]
        offset = torch.where((offset < 0) & (view == most), inside, offset)
    corners = (torch.arange(most.shape[2]) * kernel[0] * width)[:, None]
    return most, offset + corners + torch.arange(most.shape[3]) * kernel[1]


def _max_pool_backward(
    gradient: Tensor,
    image: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Any:
    if image.dim() != 4 or not _is_tiling(kernel, stride, padding, dilation, ceil_mode):
        return NotImplemented
    views, most = _places(image, kernel)
    found, parts = torch.zeros((), dtype=torch.bool), []
    for view in views:
        is_most = view == most
        parts.append(torch.where(is_most & ~found, gradient, 0.0))
        found = found | is_most
    count, channels, rows, columns = gradient.shape
    high, wide = kernel
    tiles = torch.stack(parts, -1).view(count, channels, rows, columns, high, wide)
    whole = tiles.permute(0, 1, 2, 4, 3, 5).reshape(count, channels, rows * high, columns * wide)
    below, right = image.shape[2] - rows * high, image.shape[3] - columns * wide
    return _ATEN.constant_pad_nd(whole, [0, right, 0, below])


def _addmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """A library's addmm first copies what is added to every row. Inductor would make an addmm of a
    product and an addition again, but not of a subtraction, which rounds in the same way.
    """
    if beta != 1 or alpha != 1:
        return NotImplemented
    return left @ right - (-added)


def _safe_softmax(inputs: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """As torch's, with zeros where all inputs are -inf, but without a second look at the inputs."""
    if dtype not in (None, inputs.dtype):
        return NotImplemented
    most = inputs.amax(dim, keepdim=True)
    powers = torch.exp(inputs - torch.where(most == -torch.inf, 0.0, most))
    total = powers.sum(dim, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total)


FAST_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    _ATEN.addmm.default: _addmm,
    _ATEN._safe_softmax.default: _safe_softmax,
    _ATEN.convolution.default: _convolution,
    _ATEN.convolution_backward.default: _convolution_backward,
    _ATEN.max_pool2d_with_indices.default: _max_pool,
    _ATEN.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
