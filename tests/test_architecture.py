"""The book's page Architecture: its figure follows the imports, its types exist, its examples print what it says."""

import re
from pathlib import Path
from xml.etree import ElementTree

import architecture
import pytest
import torch
from test_readme import blocks, printed_by

import ackpt.graph

PAGE = (Path(__file__).parent.parent / "book" / "architecture.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(tmp_path):
    assert printed_by("".join(blocks("python", PAGE)), tmp_path) == "".join(blocks("text", PAGE))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:ackpt|experiments)/[\w/]+\.py)`", PAGE))))
def test_every_file_that_the_page_names_exists(path):
    assert (Path(__file__).parent.parent / path).exists()


def test_every_part_is_on_the_page_once():
    assert sorted(re.findall(r"```\{architecture\} (\w+)", PAGE)) == sorted(architecture.PARTS)


def test_the_figure_has_every_package_once_and_only_arrows_that_lead_down():
    edges = architecture.reduced(architecture.packages())
    depth = {node: number for number, row in enumerate(architecture.rows(edges)) for node in row}
    assert set(depth) >= set(edges) and len(edges) > 12 and all(set(node.split(">")) <= set(edges) for node in depth)
    assert all(depth[node] > depth[other] for node, others in edges.items() for other in others)
    svg = ElementTree.fromstring(architecture.figure())
    arrows = [path for path in svg.iter("path") if path.get("class") == "head"]
    assert len(arrows) == sum(map(len, edges.values()))
    assert {text.text.removesuffix(".py") for text in svg.iter("text") if text.get("class") != "type"} == set(edges)


def test_edges_that_follow_from_others_are_left_out_and_no_others():
    edges = {"d": {"a", "b", "c"}, "c": {"a"}, "b": {"a"}, "a": set()}
    assert architecture.reduced(edges) == {"d": {"b", "c"}, "c": {"a"}, "b": {"a"}, "a": set()}
    assert architecture.rows(architecture.reduced(edges)) == [["a"], ["b", "c"], ["d"]]


@pytest.mark.parametrize("stage", architecture.STAGES, ids=lambda stage: stage.name)
def test_a_stage_returns_a_public_type_with_the_fields_of_the_page(stage):
    names = set(architecture.fields(stage.returns))
    assert len(names) > 2
    assert stage.returns in ackpt.graph.__all__
    graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8))
    plan = ackpt.plan(graph)
    made = {
        "JointGraph": graph,
        "Profile": ackpt.profile(graph),
        "Schedule": plan.schedule,
        "Plan": plan,
        "Rewritten": ackpt.graph.rewrite(graph, plan.schedule),
    }
    assert names <= set(vars(made[stage.returns]))
    path, line = architecture.definition(stage.function, stage.package)
    assert f"def {stage.function}(" in path.read_text(encoding="utf-8").splitlines()[line - 1]
