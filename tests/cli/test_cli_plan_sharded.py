"""``ackpt plan --fsdp``: a rank's share, what is said of it, and what cannot be planned so."""

import json

import pytest
import torch

from ackpt.cli import main
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest

pytestmark = pytest.mark.usefixtures("captured_once")
LM = ["lm", "--seq-len", "16", "--set", "dim=32", "ff_dim=64", "layers=2", "head_dim=16", "vocab_size=100"]


def test_a_rank_has_its_share_of_the_shards(capsys):
    options = ["--fsdp", "2", "8", "--dtype", "bfloat16", "--shard-dtype", "float32", "--json"]
    assert main(["plan", *LM, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sweep"], [own["ranks"] for own in found["plans"]]) == ("fsdp", [2, 8])
    two, eight = (own["at_peak"] for own in found["plans"])
    parameters = found["plans"][0]["parameters"]
    assert two["parameters"] == 2 * parameters
    assert 8 * eight["parameters"] > 4 * parameters  # padded: eight do not divide a hundred words
    for own in found["plans"]:
        assert own["peak_bytes"] == sum(own["at_peak"].values()) == own["resident_bytes"] + own["dynamic_peak_bytes"]
        shards = own["fsdp"]
        assert (shards["all_gathers"], shards["reduce_scatters"], own["recompute_flops"]) == (5, 3, 0)
        assert shards["blocks"][0]["count"] == 2 and own["device"] is None


def test_a_sharded_plan_prints_its_parts(capsys):
    assert main(["plan", *LM, "--fsdp", "2", "8", "--budget", "1GiB", "--device-profile", "h100-80g"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "blocks            2: blocks.0 to blocks.1"
    assert sum(line.endswith(", all that backward reads") for line in lines) == 2
    assert lines[-1] == "fewest that fit   2 ranks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fsdp", "0"], "--fsdp 0: shard over at least 2 ranks"),
        (["--fsdp", "2", "--policy", "rotor"], "policy 'rotor' does not plan shards"),
        (["--fsdp", "2", "--budget", "1kB"], "on a rank, policy 'auto' cannot keep the budget '1kB'"),
        (["--fsdp", "2", "--shard-dtype", "int4"], "--shard-dtype 'int4' is not a dtype"),
        (["--reduce-dtype", "float32"], "--reduce-dtype says how --fsdp shards: give --fsdp as well"),
        (["--fsdp", "2", "--output", "plan.json"], "not one of the whole step: leave out --output; --json prints"),
    ],
)
def test_options_that_exclude_sharding_are_refused(capsys, arguments, message):
    assert main(["plan", *LM, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


@pytest.mark.parametrize("policy", ["none", "full"])
def test_every_block_of_a_rank_is_freed_as_it_was_allocated(policy):
    """Also in deep models, of which the first and the last block stand for the others; without cuBLAS's workspaces."""
    pytest.importorskip("transformers")
    fields = {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"intermediate_size": 256, "vocab_size": 1000}
    request = StepRequest("hf:LlamaConfig", 2, 128, None, fields, torch.bfloat16)
    model = ShardedModel(PlanConfig(request, device="l4"))
    plan = model.plan(Sharding(2, torch.float32, torch.float32), None, policy)
    memory = model.memory(plan)
    assert memory is not None and memory.allocated - 2 * 8_519_680 == plan.peak_bytes


def test_a_rank_fits_by_reserved_bytes_and_context_as_a_single_gpu_does(capsys):
    options = [*LM, "--fsdp", "2", "--device-profile", "t4"]

    def planned(*more):
        assert main(["plan", *options, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = planned()
    memory, size = found["device"]["memory"], found["device"]["memory_bytes"]
    workspaces = 2 * 8_519_680  # of cuBLAS, in forward and backward
    assert memory["allocated"] - workspaces == found["peak_bytes"] and memory["reserved"] % 2**20 == 0
    assert memory["margin"] == size - memory["reserved"] - memory["context"] > 0 and found["device"]["fits"]
    most = int(size - 1.24 * memory["reserved"]) // 2**20
    assert most < (size - found["peak_bytes"]) // 2**20
    for context, fits in ((most, True), (most + 1, False)):
        assert planned("--context-mib", str(context))["device"]["fits"] is fits
    reserved = memory["reserved"] / 2**20
    more = (size - memory["reserved"]) // 2**20 + 1
    for context, verdict in ((most + 1, "may not fit"), (more, "does not fit")):
        assert main(["plan", *options, "--context-mib", str(context)]) == 0
        assert f"  device          {verdict} t4: {reserved:.1f} MiB reserved and " in capsys.readouterr().out
