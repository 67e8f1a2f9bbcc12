"""What a published block saves per token follows from its shapes and from the norm."""

import pytest
import torch

from experiments.published import reference
from experiments.published.block_bytes import WORKSPACES, saved_per_token, with_fused_norms

WIDTH, FF, HEADS = 64, 128, 2


def block(has_fused_norms):
    made = reference.Block(WIDTH, FF, WIDTH // HEADS, reference.PackedFlashAttention.apply)
    return with_fused_norms(made) if has_fused_norms else made


@pytest.mark.parametrize(
    ("dtype", "has_fused_norms", "widths"),
    [(torch.bfloat16, True, 20), (torch.bfloat16, False, 44), (torch.float32, True, 28), (torch.float32, False, 48)],
)
def test_bytes_per_token_of_published_blocks(dtype, has_fused_norms, widths):
    saved = saved_per_token(lambda: block(has_fused_norms), WIDTH, dtype)
    assert saved == widths * WIDTH + 4 * FF + 12 * HEADS + 8


def test_two_threads_have_a_workspace_of_32_mib_each():
    assert WORKSPACES == 64 * 2**20
