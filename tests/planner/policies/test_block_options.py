"""Blocks of one structure share their options, and these are the options that each would find itself."""

import torch

import ackpt
from ackpt.planner.policies.chains.block_options import BlockStep, options_of_blocks
from ackpt.planner.policies.chains.blocks import coarse_chain
from ackpt.planner.policies.search.frontier import costs


def block(width):
    return torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.LayerNorm(width),
        torch.nn.GELU(),
        torch.nn.Linear(width, 8),
        torch.nn.Tanh(),
    )


def saved_by(options):
    return [[option.saved for option in of_block] for of_block in options]


def test_shared_options_are_those_of_every_block():
    model = torch.nn.Sequential(*(block(width) for width in (32, 32, 48, 32, 48, 32)))
    graph = ackpt.trace(model, torch.randn(16, 8))
    profile = ackpt.profile(graph)
    cost, workspace = tuple(costs(graph, profile)), tuple(range(len(graph.nodes)))
    for of_nodes in (profile.workspace_bytes, workspace):  # in the second, no two blocks are equal
        chain = coarse_chain(graph)
        steps = [BlockStep(graph.analysis, each, chain.pinned, cost, of_nodes) for each in chain.blocks]
        shared, own = options_of_blocks(graph, chain, cost, of_nodes), [step.options() for step in steps]
        assert shared == own
        assert saved_by(shared) == saved_by(own)
        structures = {step.structure()[0] for step in steps}
        assert (len(structures) < len(steps)) == (of_nodes is profile.workspace_bytes)
