from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lineattn.nn.common import kernel_size
from lineattn.ops import channels


@pytest.mark.parametrize("count", [1, 2, 8, 128])
def test_channel_conv_is_a_padded_convolution(count: int):
    weight, y = torch.randn(1, 1, kernel_size(count)), torch.randn(3, count)
    expected = F.conv1d(y[:, None], weight, padding=weight.shape[-1] // 2)[:, 0]
    assert torch.allclose(channels.channel_conv(y, weight), expected, rtol=1e-13, atol=1e-13)


def test_heads_are_runs_of_channels():
    y = torch.arange(6.0)[None]
    assert channels.heads(y, 3).tolist() == [[[0, 1], [2, 3], [4, 5]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pool_sums_in_float32(dtype: torch.dtype):
    """1.001 is no half-precision number and a sum of 16384 of it none either; the mean over space must not drift."""
    x = torch.full((1, 2, 128, 128), 1.001).to(dtype)
    assert channels.pool(x).dtype == torch.float32
    assert torch.allclose(channels.pool(x), x[:, :, 0, 0].float(), rtol=1e-6)
