"""What the README shows is what happens: its example runs and prints what it says, its commands and files exist."""

import re
import statistics
from pathlib import Path

import pytest
from address import colab_address, project, repository_address
from forked import output_of

from ackpt.planner.costs import devices
from experiments.reports.frontier_times import added_time, at_the_peak_of_blocks
from experiments.results import Record
from experiments.steps.peers import MEMORY_BUDGET

ROOT = Path(__file__).resolve().parent.parent
BETWEEN = "=" * 10  # printed between the outputs of two examples
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def printed_by(code: str, folder: Path) -> str:
    """What code prints in a new process."""
    Path(folder, "code.py").write_text(code, encoding="utf-8")
    return output_of(Path(folder, "code.py"), folder=ROOT)


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """What the examples print: the README's two, the second one with those of `using`, and the book's first page's."""
    pages = {name: (ROOT / "book" / f"{name}.md").read_text(encoding="utf-8") for name in ("using", "index")}
    model, blocks_of_layers = blocks("python")
    (first_page,) = blocks("python", pages["index"])
    codes = [model, blocks_of_layers + "".join(blocks("python", pages["using"])), first_page]
    return printed_by(f"print({BETWEEN!r})\n".join(codes), tmp_path_factory.mktemp("code")).split(BETWEEN + "\n")


def test_the_examples_print_what_the_readme_says(printed: list[str]) -> None:
    first, second = blocks("text")
    assert printed[0] == first and printed[1].startswith(second)


def test_the_budget_is_kept_as_the_books_first_page_says(printed: list[str]) -> None:
    (said,) = blocks("text", (ROOT / "book" / "index.md").read_text(encoding="utf-8"))
    assert printed[2] == said


def test_the_offload_example_moves_the_activations_of_layers(printed: list[str]) -> None:
    lines = printed[1].splitlines()
    (moved,) = (int(line) for line in lines if line.isdecimal())
    assert moved >= 7 * 2**24  # what seven of eight layers save
    assert lines[-1] == "saved: 128 B in 1 tensor, in addition to 256 B of parameters and 64 B of inputs"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    reproduce, tests = (block.strip() for block in blocks("bash"))
    assert reproduce.endswith("nox -s reproduce")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("\n" + tests)


@pytest.mark.parametrize("page", ["README.md", "book/index.md", "book/out_of_memory.md"])
def test_the_headline_has_the_times_and_flops_of_the_records(page: str) -> None:
    times = at_the_peak_of_blocks(Record.load(ROOT / "results" / "frontiers" / "frontier-bert.json"))
    assert times is not None
    per_block, plan = (round(100 * time) for time in times)
    said = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    folder = ROOT / "results" / "cpu"
    baseline, plan_of_large, blocks_of_large = (
        Record.load(folder / f"09_bert-predicted-B8-L512-{method}.json").metrics["flops"]
        for method in ("baseline", "auto-0.3", "per-block")
    )
    on_gpu = [f"{100 * (flops / baseline - 1):.1f} %" for flops in (plan_of_large, blocks_of_large)]
    assert "{} of the FLOPs recomputed instead of {}".format(*on_gpu) in said
    headline = f"per-block checkpointing needs, a plan adds {plan} % of the step's time instead of {per_block} %"
    assert headline in said
    if page == "book/index.md":
        transformer = at_the_peak_of_blocks(Record.load(ROOT / "results" / "frontiers" / "frontier-transformer.json"))
        assert transformer is not None
        per_block, plan = (round(100 * time) for time in transformer)
        assert f"A Transformer without dropout: {plan} % instead of {per_block} %." in said


def test_the_errors_of_predictions_are_those_of_the_badge() -> None:
    badge = (ROOT / "results" / "cpu" / "11_badge.md").read_text(encoding="utf-8")
    found = re.search(r"validated on (\d+) published measurements, median error (\S+) %, largest \+(\d+)\.\d %", badge)
    assert found is not None
    said = "checked against {} published measurements (median error {} %, largest {} %).".format(*found.groups())
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_page_has_the_peaks_of_plans_and_the_memory_budget_with_inductor() -> None:
    metrics = Record.load(ROOT / "results" / "frontiers" / "frontier-bert-inductor.json").metrics
    budgets = [row for row in metrics["peers"] if row["peer"] == MEMORY_BUDGET]
    shares = []
    for points in (metrics["points"], budgets):
        lowest = min(points, key=lambda point: point["measured_peak_bytes"])
        shares.append(round(100 * lowest["measured_peak_bytes"] / metrics["baseline"]["measured_peak_bytes"]))
        assert abs(added_time(lowest)) < 0.02
    said = " ".join((ROOT / "book" / "index.md").read_text(encoding="utf-8").split())
    plan, memory_budget = shares
    assert f"needs {plan} % of its peak with a plan, and {memory_budget} % with PyTorch's memory budget" in said


def test_the_cost_of_blocks_on_gpus_is_that_of_the_published_times() -> None:
    table = (ROOT / "results" / "tables" / "11_time_ratios.md").read_text(encoding="utf-8")
    alike = [line for line in table.splitlines() if "| checkpointing / baseline |" in line and " / 1 of " not in line]
    ratios = [float(line.split("|")[5]) for line in alike]
    least, median, most = (round(100 * (f(ratios) - 1)) for f in (min, statistics.median, max))
    said = " ".join((ROOT / "book" / "out_of_memory.md").read_text(encoding="utf-8").split())
    assert f"on GPUs, others measured {least} to {most} % more time, with a median of {median} %" in said


def test_the_budgets_of_the_first_answer_leave_the_context_and_a_fifth_of_themselves() -> None:
    rows = (ROOT / "book" / "out_of_memory.md").read_text(encoding="utf-8").splitlines()
    begin = rows.index("| GPU | budget |") + 2
    table = (row.strip("|").split("|") for row in rows[begin : rows.index("", begin)])
    said = {gpus.strip(): int(re.sub(r"\D", "", budget)) for gpus, budget in table}
    assert len(said) == 8
    meant = {"RTX 3090, 4090": ("rtx3090", "rtx4090"), "A100 40 GB": ("a100-40g",)}
    meant["A100 80 GB, H100"] = ("a100-80g", "h100-80g")
    for gpus, gib in said.items():
        names = meant.get(gpus) or gpus.lower().replace("rtx ", "rtx").split(", ")
        room = min(devices.DEVICES[name].memory_bytes for name in names) / 2**30
        assert gib == int((room - 0.6) / 1.2), gpus


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_every_link_leads_to_a_file_of_the_checkout(target: str) -> None:
    """Pages of the book are linked where they are published, because GitHub does not render MyST."""
    site, workflows = project()["urls"]["Documentation"], f"{repository_address()}/actions/workflows/"
    if target.startswith(site):
        page = target.removeprefix(site).removesuffix(".html") or "index"
        assert any((ROOT / "book" / f"{page}{ending}").exists() for ending in (".md", ".ipynb"))
    elif target.startswith(workflows):
        assert (ROOT / ".github" / "workflows" / target.removeprefix(workflows).removesuffix("/badge.svg")).exists()
    elif target.startswith("https://colab."):
        path = target.partition("/blob/main/")[2]
        assert "assets" in target or (target == colab_address(repository_address(), path) and (ROOT / path).exists())
    else:
        assert (ROOT / target).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"ackpt\.(\w+)\(", README))))
def test_every_function_of_the_readme_is_public(name: str) -> None:
    import ackpt

    assert name in ackpt.__all__
