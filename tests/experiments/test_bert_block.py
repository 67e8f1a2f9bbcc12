"""What the blocks of a BERT keep, counted by hand, and what plans save of it."""

import pytest
import torch

import ackpt
from experiments.bert import of_blocks, saved_in
from experiments.models import BertConfig, BertForMaskedLM

D, F, H, L, B, T = 16, 32, 2, 2, 32, 8


@pytest.fixture(scope="module")
def graph():
    model = BertForMaskedLM(BertConfig(dim=D, ff_dim=F, layers=L, heads=H, vocab_size=11))
    ids = torch.randint(11, (B, T))
    return ackpt.trace(model, input_ids=ids, labels=ids)


def test_every_block_saves_the_bytes_counted_by_hand(graph):
    blocks = of_blocks(ackpt.plan(graph, policy="none"))
    numbers = 10 * D + 2 * F + 3 * H * T + 4
    assert {block: sum(a.bytes for a in kept) for block, kept in blocks.items()} == dict.fromkeys(
        range(L), 4 * B * T * numbers
    )


def test_one_row_per_activation_with_the_blocks_that_save_it(graph):
    plans = {"none": ackpt.plan(graph, policy="none"), "0.5": ackpt.plan(graph, 0.5)}
    rows = saved_in(plans)
    assert [row["none"] for row in rows] == [L] * len(rows)
    saved = sum(a.fate == "saved" for kept in of_blocks(plans["0.5"]).values() for a in kept)
    assert sum(row["0.5"] for row in rows) == saved < L * len(rows)
