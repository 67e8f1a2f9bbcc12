"""The workspace at other sizes, mostly without running the operations, is that of running every operation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from ackpt.planner.capture.aot import capture
from ackpt.planner.capture.call_facts import WatchedModel, call_of
from ackpt.planner.capture.dynamic_sizes import Dimension
from ackpt.planner.capture.optimizer_state import NO_LOOP
from ackpt.planner.costs.workspace import workspace_bytes
from ackpt.planner.step.plans import CapturedStep


class Mixed(nn.Module):
    """Operations with and without workspace on the CPU."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.embed, self.norm = nn.Embedding(40, 32), nn.LayerNorm(32)
        self.linear, self.conv = nn.Linear(32, 32), nn.Conv1d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 40)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        if self.kind == "attention":
            scores = x @ x.transpose(1, 2)
            scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, float("-inf"))
            x = F.dropout(scores.softmax(-1), 0.1) @ self.linear(x)
        elif self.kind == "fused":
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        elif self.kind == "masked":
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            x = self.norm(F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0])
        elif self.kind == "convolution":
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "sums":
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            x = torch.where(mask, x @ x.transpose(1, 2), 0.0) @ x + x.sum((0, 1))
            return self.head(x).square().mean() + x.exp().sum((0, 1, 2))
        elif self.kind == "expanded gradient":
            return F.gelu(self.linear(x)).sum()
        elif self.kind == "dtypes":
            x = x * ids[..., None] + torch.arange(ids.shape[1])[:, None] / 7 + x.double().sum()
        elif self.kind == "cumulative":
            x = torch.cat([x.cumsum(1), x.flip(1)], 1).sort(1).values.float()
            return self.head(x).logsumexp(-1).std()
        return F.cross_entropy(self.head(x.float()).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    "kind", ["attention", "fused", "masked", "convolution", "dtypes", "cumulative", "sums", "expanded gradient"]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_workspace_is_that_of_running_every_operation(kind, threads):
    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, ids = Mixed(kind), torch.randint(0, 40, (4, 12))
        leaves, _ = tree_flatten(((ids,), {}))
        with capture(model, (ids,), {}, dynamic=[Dimension(0, 0), Dimension(0, 1)]) as captured:
            step = CapturedStep(captured, call_of(WatchedModel(model), (ids,), {}), model, NO_LOOP)
        assert len(leaves) == 1
        for batch, length in ((2, 3), (4, 13), (3, 100), (16, 64), (64, 130), (2, 600)):
            graph = step.graph((batch, length))
            assert step.workspace_bytes((batch, length)) == workspace_bytes(graph), (batch, length)
    finally:
        torch.set_num_threads(was)
