"""``ackpt plan`` with clipping, loss scaling, any optimizer, checkpointed blocks, and several GPUs."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from test_cli_plan import BERT, LLAMA, SMALL, planned

import ackpt
from ackpt.planner.workloads.planned_shapes import PlanConfig, run_plan
from ackpt.planner.workloads.step_request import Lora, StepRequest, optimizer_kind

pytestmark = pytest.mark.usefixtures("captured_once")


def planned_and_measured(config: PlanConfig) -> tuple[int, int]:
    """Peaks: of the plan, and of the second step of the planned model with real tensors on the CPU."""
    done = run_plan(config)
    step, model = done.step, done.step.model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    ids = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in step.inputs.items()}
    optimizer = optimizer_kind(config.optimizer)(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=config.scaling)

    def run():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.float16, enabled=config.autocast == "float16"):
            loss = model(**ids)
        loss = scaler.scale(loss)
        loss.backward()
        del loss
        if config.clipping:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    run()
    resident = [model, optimizer, *ids.values(), *((scaler._scale, scaler._growth_tracker) if config.scaling else ())]
    return done.plan.peak_bytes, ackpt.measure(run, resident=resident, repeats=0).peak_bytes


@pytest.mark.parametrize("optimizer", ["adamw-for-loop", "sgd"])
def test_clipping_and_scaling_take_the_measured_bytes(optimizer):
    step = StepRequest("bert-base", 2, 64, fields={**SMALL["bert"].fields, "vocab_size": 50})
    alone = PlanConfig(replace(step, seq_len=2), optimizer=optimizer)
    without = planned_and_measured(alone)
    for clipping, scaling in ((False, True), (True, False), (True, True)):
        short = replace(alone, clipping=clipping, scaling=scaling)
        expected, measured = planned_and_measured(replace(short, step=step))  # the peak is in backward
        assert expected == measured
        # Here it is in the optimizer's step, whose own temporaries on a CPU include scalars that no prediction has.
        expected, measured = planned_and_measured(short)
        assert expected - without[0] == measured - without[1]


def test_a_scaler_adds_its_scalars(capsys):
    without, scaled = (planned(capsys, *BERT, "--autocast", "float16", *o) for o in ([], ["--grad-scaler"]))
    assert (scaled["scaling"], without["scaling"]) == (True, False)
    assert scaled["resident_bytes"] - without["resident_bytes"] == 8  # scale and growth tracker
    assert scaled["peak_bytes"] - without["peak_bytes"] == 8 + 4  # while the optimizer runs: found_inf
    on_gpu = [planned(capsys, *BERT, "--device-profile", "t4", *o) for o in ([], ["--grad-scaler"])]
    assert on_gpu[1]["resident_bytes"] - on_gpu[0]["resident_bytes"] == 2 * 512


def test_any_optimizer_class_of_torch_is_accepted(tmp_path, monkeypatch, capsys):
    (tmp_path / "lions.py").write_text(
        "import torch\n\n\n"
        "class Lion(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr=1e-4):\n"
        "        super().__init__(params, {'lr': lr})\n\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for parameter in self.param_groups[0]['params']:\n"
        "            state = self.state[parameter]\n"
        "            momentum = state.setdefault('momentum', torch.zeros_like(parameter))\n"
        "            parameter.add_(momentum.mul_(0.9).add_(parameter.grad, alpha=0.1).sign(), alpha=-1e-4)\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    found = planned(capsys, *BERT, "--optimizer", "lions:Lion")
    assert sys.path == before
    adamw = planned(capsys, *BERT)
    assert found["at_peak"]["optimizer"] == found["at_peak"]["parameters"]
    assert found["at_peak"]["parameters"] == adamw["at_peak"]["parameters"]
    assert planned(capsys, *BERT, "--optimizer", "torch.optim:NAdam")["resident_bytes"] > found["resident_bytes"]


def test_blocks_are_checkpointed_as_asked_for(capsys):
    asked = [[], ["--every-n-layers", "2"], ["--every-n-layers", "1"], ["--save", "matmuls"]]
    none, second, every, matmuls = (planned(capsys, *LLAMA, "--optimizer", "none", *options) for options in asked)
    assert [each["policy"] for each in (none, second, every, matmuls)] == ["none", *["selective"] * 3]
    assert none["saved_bytes"] > second["saved_bytes"] > every["saved_bytes"]
    assert 0 == none["recompute_flops"] == matmuls["recompute_flops"]
    assert every["recompute_flops"] == 2 * second["recompute_flops"]
    assert second["options"] == {"every_n_layers": 2}
    offloaded = planned(capsys, *LLAMA, "--offload-blocks", "--device-profile", "h200")
    assert offloaded["saved_bytes"] < every["saved_bytes"]


def test_common_fields_of_every_configuration_can_be_set(capsys):
    eager, chosen = (planned(capsys, *LLAMA, f"attn_implementation={name}") for name in ("eager", "sdpa"))
    assert eager["saved_bytes"] > chosen["saved_bytes"]
    classifier = ["hf:BertConfig", "--seq-len", "16", "--set", "hidden_size=32", "intermediate_size=64"]
    classifier += ["vocab_size=50"]
    classifier += ["num_hidden_layers=1", "num_attention_heads=2", 'architectures=["BertForSequenceClassification"]']
    three, ten = (planned(capsys, *classifier, f"num_labels={n}") for n in (3, 10))
    assert ten["parameters"] - three["parameters"] == 7 * (32 + 1)


def test_json_has_one_format(capsys):
    (alone, sharded) = (planned(capsys, *LLAMA, *options) for options in ([], ["--fsdp", "2"]))
    assert set(alone) == set(sharded)
    assert (alone["fsdp"], sharded["fsdp"]["ranks"]) == (None, 2)
    both = planned(capsys, *LLAMA, "--fsdp", "2", "4", "--budget", "1MiB")
    assert (both["sweep"], both["fewest"], set(both["plans"][1])) == ("fsdp", 2, {"ranks", *alone})
    assert math.isclose(both["plans"][0]["at_peak"]["parameters"], 2 * both["plans"][1]["at_peak"]["parameters"])


pytest.importorskip("peft")
ADAPTERS = 2 * 2 * 2 * (4 * 32)  # layers, targets, matrices of rank 4


def test_only_adapters_have_gradients_and_state(capsys):
    full, adapted = planned(capsys, *LLAMA), planned(capsys, *LLAMA, "--lora", "r=4", "targets=q_proj,v_proj")
    assert adapted["parameters"] - full["parameters"] == ADAPTERS
    counts = 2 * 2 * 2 * 4  # of steps, one for each matrix
    assert adapted["at_peak"]["optimizer"] == 2 * 4 * ADAPTERS + counts < full["at_peak"]["optimizer"]


def test_adapters_of_a_model_in_half_precision_are_in_float32(capsys):
    lora = ["--lora", "r=4", "targets=q_proj,v_proj", "--optimizer", "none"]
    half, own = (planned(capsys, *LLAMA, "--dtype", "bfloat16", *options) for options in ([], lora))
    assert own["at_peak"]["parameters"] - half["at_peak"]["parameters"] == 4 * ADAPTERS


def test_an_adapter_configuration_file_is_read(tmp_path):
    path = tmp_path / "adapter_config.json"
    fields = {"r": 8, "target_modules": ["o_proj"]}
    path.write_text(json.dumps({**fields, "peft_type": "LORA", "base_model_name_or_path": "x", "revision": None}))
    assert Lora.parsed([str(tmp_path)]) == Lora.parsed([str(path)]) == Lora(fields)
