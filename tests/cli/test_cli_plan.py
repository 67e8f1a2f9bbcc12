"""``ackpt plan``: peaks equal to the prediction of the eager step, the right head for a configuration, clear errors."""

import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import model_of, raises
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.cli import main
from ackpt.cli import plan_text as plan_report
from ackpt.core.budget import readable
from ackpt.graph import Plan, PlanError
from ackpt.metering.autograd_engine import SavedNumbers
from ackpt.metering.kernel_memory import Workspaces
from ackpt.metering.run_alone import Allocations
from ackpt.planner.costs.devices import device
from ackpt.planner.workloads.planned_shapes import CapturedCudaChoices, PlanConfig, run_plan
from ackpt.planner.workloads.step_request import StepRequest, autocast
from experiments.models import BertConfig, BertForMaskedLM

pytestmark = pytest.mark.usefixtures("captured_once")
BERT = ["bert-base", "--seq-len", "16", "--set", "dim=32", "ff_dim=64", "layers=1", "heads=2", "vocab_size=100"]
GPT2 = ["hf:GPT2Config", "--seq-len", "16", "--set", "n_layer=1", "n_embd=32", "n_head=2", "vocab_size=100"]
GPT2 += ["bos_token_id=0", "eos_token_id=0"]
LLAMA = ["hf:LlamaConfig", "--seq-len", "16", "--set", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2"]
LLAMA += ["num_attention_heads=4", "num_key_value_heads=4", "vocab_size=100"]
LM = ["lm", "--seq-len", "16", "--set", "dim=32", "ff_dim=64", "layers=2", "head_dim=16", "vocab_size=100"]


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(dim=32, ff_dim=64, layers=1, heads=2, vocab_size=100))


def planned(capsys, *arguments) -> dict:
    status = main(["plan", *arguments, "--json"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return json.loads(out)


def request(model, batch_size=2, seq_len=None, image_size=None, **fields) -> StepRequest:
    return StepRequest(model, batch_size, seq_len, image_size, fields)


SMALL = {
    "transformer": request("transformer", seq_len=64, dim=64, ff_dim=256, layers=1, head_dim=16),
    "lm": request("lm", seq_len=64, dim=64, ff_dim=256, layers=1, head_dim=16, vocab_size=1000),
    "resnet": request("resnet18", image_size=64, width=8, num_classes=10, depths=[1, 1, 1, 1]),
    "bert": request("bert-base", seq_len=64, dim=64, ff_dim=256, layers=1, heads=4, vocab_size=1000, dropout=0.0),
}


# On the CPU in bfloat16 the graph has the true dtypes of norms' statistics, which eager on fake tensors has not.
@pytest.mark.parametrize(("where", "dtype"), [(None, "float32"), ("t4", "float32"), ("h100-80g", "bfloat16")])
@pytest.mark.parametrize("name", SMALL)
def test_the_peak_is_that_of_the_eager_step_on_tensors_without_data(name, where, dtype, monkeypatch):
    if (name, dtype) == ("transformer", "bfloat16"):
        pytest.skip("its peak lies in an RMSNorm, which the graph takes apart as on the CPU; the GPU's kernel is fused")
    found = run_plan(PlanConfig(SMALL[name], autocast=dtype, optimizer="none", device=where))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = found.step.model.to_empty(device="cpu")
        inputs = {
            key: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in found.step.inputs.items()
        }

    def step():
        model.zero_grad(set_to_none=True)
        with autocast("cpu", dtype):
            loss = model(**inputs)
        loss.backward()

    # A plan from shapes alone has no workspaces of a CPU, and no numbers that autograd saves there.
    monkeypatch.setattr(Workspaces, "of", lambda *_: Allocations(0, 0, ()))
    monkeypatch.setattr(SavedNumbers, "save", lambda *_: None)
    resident = (model, *(value for value in inputs.values() if isinstance(value, torch.Tensor)))
    eager = ackpt.predict(step, resident=resident, device=where or "cpu", round_to=1 if where is None else 512)
    # At the peak of this ResNet two gradients meet. Autograd adds them in place; a captured graph does not.
    sums = 2 * 8 * 8 * 8 * 4 if name == "resnet" and dtype == "float32" else 0
    assert found.plan.resident_bytes == eager.resident_bytes
    assert found.plan.dynamic_peak_bytes == eager.dynamic_peak_bytes + sums


def test_the_printed_categories_add_up_to_the_peak(capsys):
    parameters = sum(parameter.numel() for parameter in bert().parameters())
    assert main(["plan", *BERT]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"BertForMaskedLM, {parameters:,} parameters in float32" in out
    assert "input_ids [1, 16] int64, labels [1, 16] int64" in out
    assert len(out.partition("ten largest")[2].splitlines()) == 1 + 10
    assert main(["plan", *BERT, "layers=2"]) == 0
    assert "2 x bert.blocks.*.up (addmm): " in capsys.readouterr().out

    found = planned(capsys, *BERT)
    assert sum(found["at_peak"].values()) == found["peak_bytes"]
    assert found["at_peak"]["parameters"] == 4 * parameters
    assert found["largest"][0]["bytes"] == max(activation["bytes"] for activation in found["largest"])
    assert found["device"] is None and found["policy"] == "none"


def test_optimizer_state_counts(capsys):
    names = ("adamw", "adafactor", "sgd-momentum", "sgd", "none")
    adamw, adafactor, momentum, sgd, none = (planned(capsys, *BERT, "--optimizer", name) for name in names)
    assert none["at_peak"]["optimizer"] == sgd["at_peak"]["optimizer"] == 0
    assert momentum["at_peak"]["optimizer"] == momentum["at_peak"]["parameters"]
    assert 0 < adafactor["at_peak"]["optimizer"] < momentum["at_peak"]["optimizer"]
    assert main(["plan", *BERT, "--optimizer", "adafactor", "--fsdp", "2"]) == 2
    assert "--fsdp shards an optimizer's state like its parameters" in capsys.readouterr().err
    assert adamw["at_peak"]["optimizer"] >= 2 * none["at_peak"]["parameters"]


def test_the_written_plan_is_that_of_the_model_with_data(tmp_path, capsys):
    """What is planned from shapes runs: the graph is that of the real model called with the same arguments."""
    path = tmp_path / "new" / "plan.json"
    found = planned(capsys, *BERT, "--policy", "full", "--output", str(path))
    plan = Plan.load(path)
    assert (plan.peak_bytes, plan.policy) == (found["peak_bytes"], "full")
    model = bert()
    x = torch.randint(0, 100, (1, 16))
    y = x.clone()
    step = ackpt.compile(model, input_ids=x, labels=y, plan=plan)
    assert step.plan is plan
    step(input_ids=x, labels=y).backward()
    z = torch.randint(0, 100, (1, 8))
    assert ackpt.compile(model, input_ids=z, labels=z.clone(), plan=plan).plan.sizes == ((1, 8), (1, 8))
    raises(PlanError, "another graph", lambda: ackpt.compile(model.eval(), input_ids=x, labels=y, plan=plan))


def test_a_plan_for_a_device_says_that_it_is_not_for_this_machine(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", *BERT, "--device-profile", "t4", "--output", str(path)]) == 0
    assert "the plan of a step on t4" in capsys.readouterr().out.splitlines()[-1]
    x = torch.randint(0, 100, (1, 16))
    with pytest.raises(PlanError, match=r"machine changed from t4 by its data sheet \(--device-profile\) to this one"):
        ackpt.compile(bert(), input_ids=x, labels=x.clone(), plan=Plan.load(path))


def test_the_call_that_takes_a_written_plan_is_printed(tmp_path, capsys):
    """With all arguments, also those that a user may not think of, and a call that forgets one is told so."""
    transformers = pytest.importorskip("transformers")
    sizes = {name: int(size) for name, _, size in (text.partition("=") for text in GPT2[4:])}
    path = tmp_path / "plan.json"
    assert main(["plan", *GPT2, "--output", str(path)]) == 0
    call = f"ackpt.compile(model, plan=ackpt.Plan.load({str(path)!r}), input_ids=..., labels=..., use_cache=False)"
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {path}; run it by {call}"
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    plan = Plan.load(path)
    x = torch.randint(0, 100, (1, 16))
    y = x.clone()
    assert ackpt.compile(model, plan=plan, input_ids=x, labels=y, use_cache=False).plan is plan
    with pytest.raises(PlanError, match="argument use_cache changed from False to not given"):
        ackpt.compile(model, plan=plan, input_ids=x, labels=y)


def test_a_budget_is_kept_by_the_policy_auto_or_by_the_one_that_is_named(capsys):
    sizes = ["transformer", "--seq-len", "64", "--set", "dim=32", "ff_dim=128", "layers=2", "head_dim=16"]
    sizes += ["--optimizer", "none"]
    plain, tight = planned(capsys, *sizes), planned(capsys, *sizes, "--budget", "0.6")
    full = planned(capsys, *sizes, "--budget", "0.6", "--policy", "full")
    assert [found["policy"] for found in (plain, tight, full)] == ["none", "auto", "full"]
    assert max(tight["dynamic_peak_bytes"], full["dynamic_peak_bytes"]) <= 0.6 * plain["dynamic_peak_bytes"]
    assert main(["plan", *sizes, "--budget", "10kB"]) == 2
    assert "The smallest feasible budget of this policy is" in capsys.readouterr().err


def test_a_step_that_exceeds_the_device_is_reported():
    step = request("transformer", batch_size=1, seq_len=2_000_000, dim=64, ff_dim=256, layers=2, head_dim=16)
    small = run_plan(PlanConfig(step, optimizer="none", device="t4"))
    assert small.device is not None and small.device.memory_bytes == device("t4").memory_bytes < small.plan.peak_bytes
    memory = small.memory
    assert memory is not None and small.plan.peak_bytes <= memory.allocated <= memory.reserved
    assert memory.margin == small.device.memory_bytes - memory.reserved - memory.context < 0
    used = f"{(memory.reserved + memory.context) / 2**30:.1f} GiB"
    verdict, advice, *_ = plan_report.text(small).splitlines()
    assert verdict == f"does not fit t4: {used} of 14.7 GiB"
    room = small.device.memory_bytes - memory.context
    suggested = f"{room * 10 // 2**30 / 10}GiB reserved"
    other = run_plan(replace(small.config, budget=suggested))  # what the user then types
    assert other.memory is not None and other.memory.fits and other.plan.cost > 0
    assert advice == (
        f'add --budget "{suggested}": that plan reserves {other.memory.reserved / 2**30:.1f} GiB and adds '
        f"{other.plan.cost:.1%} to the time of the step"
    )
    data = plan_report.to_json(small)["device"]
    full = run_plan(replace(small.config, policy="full"))
    assert (data["fits"], data["smallest_budget_of_full"]) == (False, full.plan.peak_bytes)
    assert data["memory"]["reserved"] == memory.reserved
    assert data["modelled_seconds"] > 0

    large = run_plan(PlanConfig(step, optimizer="none", device="h200"))
    assert large.memory is not None and large.memory.fits
    plain = f"{(large.memory.reserved + large.memory.context) / 2**30:.1f} GiB"
    verdict, sizes, *_ = plan_report.text(large).splitlines()
    assert verdict == f"fits h200: {plain} of 139.8 GiB"
    assert re.fullmatch(r"on h200: \S+ GiB allocated, \S+ GiB reserved, 612.0 MiB context, \S+ GiB margin", sizes)
    left = (large.memory.margin + large.memory.context - large.memory.reserved // 5) // 2**20  # a margin of 20 %
    close = run_plan(replace(large.config, context_mib=left))
    assert close.memory is not None and close.memory.fits
    assert re.match(r"may not fit h200: .*; measured steps reserved up to 21% more", plan_report.text(close))


def test_an_infeasible_budget_prints_the_minimum_the_memory_and_the_remedies():
    """Nothing is suggested that was not planned or simulated."""
    fields = {"dim": 64, "ff_dim": 256, "layers": 2, "head_dim": 16, "vocab_size": 100_000}
    step = request("lm", batch_size=1, seq_len=20_000, **fields)
    found = run_plan(PlanConfig(step, optimizer="none", device="t4"))
    assert found.memory is not None and not found.memory.fits
    room = found.device.memory_bytes - found.memory.context
    with pytest.raises(ackpt.BudgetError) as refused:
        found.that_fits()
    *_, text = plan_report.text(found).partition("\nno plan fits: ")
    verdict, *helps = text.partition("\non t4: ")[0].splitlines()
    assert verdict == (
        f"the one with the smallest peak reserves {readable(refused.value.least_bytes)}, and the context "
        f"leaves {room / 2**30:.1f} GiB"
    )
    chunked = [each for each in plan_report.explanation(found).suggestions if "chunk the head" in each.title]
    (best,) = [each for each in chunked if each.peak_bytes == min(other.peak_bytes for other in chunked)]
    assert best.peak_bytes < room and all(line.startswith("would help: ") for line in helps)
    assert f"would help: {best.title}: peak {best.peak_bytes / 2**30:.1f} GiB; {best.fix}" in helps


def test_allocated_bytes_of_a_plan_are_those_of_the_eager_step_with_workspaces():
    """Two threads multiply matrices; a block that is not split counts whole, in eager as in the plan."""
    found = run_plan(PlanConfig(request("transformer", seq_len=512, dim=256, layers=2), device="a100-80g"))
    own = run_plan(PlanConfig(found.config.step, device="a100-80g", context_mib=1000))
    assert found.memory is not None and own.memory is not None
    rest = found.memory.allocated - found.plan.peak_bytes - 2 * 8_519_680
    assert 0 <= rest < 0.05 * found.memory.allocated
    assert (own.memory.context, own.memory.margin + 1000 * 2**20) == (
        1000 * 2**20,
        found.memory.margin + found.memory.context,
    )
    with pytest.raises(ValueError, match="--context-mib is the size of a GPU's context: give 0 or more, and --device"):
        PlanConfig(found.config.step, context_mib=100)


def test_on_a_gpu_blocks_are_multiples_of_512_bytes_and_random_states_stay_on_the_host():
    step = replace(SMALL["bert"], fields={**SMALL["bert"].fields, "dropout": 0.1})
    found = run_plan(PlanConfig(step, optimizer="none", device="h200", policy="full"))
    assert {storage.bytes % 512 for storage in found.graph.storages} == {0}
    assert found.plan.schedule.replayed and {live % 512 for live in found.plan.timeline.live} == {0}


HALF, MASKED, CAUSAL, GROUPED = torch.float16, {"masked": True}, {"is_causal": True}, {"enable_gqa": True}
FLASH, EFFICIENT, CUDNN, MATH = "flash_attention", "efficient_attention", "cudnn_attention", "_softmax"
AMPERE, TURING, HOPPER, ADA = (8, 0), (7, 5), (9, 0), (8, 9)


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "kernel"),
    [
        (AMPERE, torch.float32, {}, EFFICIENT),
        (AMPERE, HALF, {}, FLASH),
        (AMPERE, torch.bfloat16, CAUSAL, FLASH),
        (AMPERE, torch.bfloat16, {"dropout_p": 0.1}, FLASH),
        (AMPERE, HALF, {"width": 12}, FLASH),
        (AMPERE, HALF, {"width": 512}, EFFICIENT),
        (AMPERE, HALF, MASKED, EFFICIENT),
        (AMPERE, torch.float32, {**MASKED, "dropout_p": 0.1}, EFFICIENT),
        (AMPERE, HALF, GROUPED, FLASH),
        (AMPERE, torch.float32, GROUPED, MATH),
        (AMPERE, torch.float32, {"width": 6}, MATH),
        (TURING, HALF, {}, EFFICIENT),
        (TURING, HALF, {"dropout_p": 0.1}, EFFICIENT),
        (TURING, torch.float32, {"width": 6}, EFFICIENT),
        (TURING, torch.bfloat16, {}, MATH),
        (HOPPER, HALF, CAUSAL, CUDNN),
        (HOPPER, HALF, {**MASKED, **GROUPED}, CUDNN),
        (HOPPER, HALF, {"dropout_p": 0.1}, FLASH),  # no multiple of 1/16
        (HOPPER, HALF, {"width": 256}, FLASH),
        (HOPPER, torch.float32, {}, EFFICIENT),
        (ADA, HALF, {"width": 192}, FLASH),
        (ADA, HALF, {"width": 200}, EFFICIENT),
        (ADA, HALF, {"width": 256}, FLASH),
        (ADA, HALF, {"width": 256, "dropout_p": 0.1}, EFFICIENT),
        (AMPERE, torch.float64, {}, MATH),
        (AMPERE, HALF, {"batch": ()}, MATH),
    ],
)
def test_attention_runs_the_kernel_that_a_gpu_would(capability, dtype, options, kernel):
    """The conditions of sdp_utils.cpp, read off what is called."""
    options = dict(options)
    width, masked, batch = options.pop("width", 16), options.pop("masked", False), options.pop("batch", (2,))
    heads = 2 if options.get("enable_gqa") else 4
    model = _attention((*batch, heads, 20, width), options).to("meta", dtype)
    mask = torch.ones(20, 20, dtype=torch.bool, device="meta") if masked else None
    with CapturedCudaChoices(capability):
        graph = ackpt.trace(model, torch.empty(*batch, 4, 20, width, dtype=dtype, device="meta"), mask)
    called = [node.target for node in graph.nodes if node.phase == "forward"]
    assert any(kernel in target for target in called)
    assert all(other not in target for other in {FLASH, EFFICIENT, CUDNN, MATH} - {kernel} for target in called)
    padded = sum("constant_pad_nd" in target for target in called)
    assert padded == {FLASH: 3 * bool(width % 8), EFFICIENT: int(masked)}.get(kernel, 0)
    assert graph.storages[graph.nodes[graph.outputs[0]].storages[0]].bytes == dtype.itemsize


def _attention(shape, options):
    def forward(self, query, mask):
        mixed = torch.nn.functional.scaled_dot_product_attention(query, self.key, self.key, mask, **self.options)
        assert mixed.shape == query.shape
        return mixed.sum()

    return model_of(forward, key=torch.nn.Parameter(torch.empty(shape)), options=options)


@pytest.mark.parametrize(
    ("arguments", "name", "inputs"),
    [
        (GPT2, "GPT2LMHeadModel", {"input_ids": "[1, 16] int64", "labels": "[1, 16] int64"}),
        (
            ["hf:BertConfig", "--seq-len", "8", "--set", "hidden_size=24", "num_hidden_layers=1", "vocab_size=100"],
            "BertForMaskedLM",
            {"input_ids": "[1, 8] int64", "labels": "[1, 8] int64"},
        ),
        (
            ["hf:T5Config", "--seq-len", "8", "--set", "d_model=32", "num_layers=1", "vocab_size=100", "d_ff=64"],
            "T5ForConditionalGeneration",
            dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), "[1, 8] int64"),
        ),
        (
            ["hf:WhisperConfig", "--seq-len", "8", "--set", "d_model=32", "encoder_layers=1", "decoder_layers=1"]
            + ["encoder_attention_heads=2", "decoder_attention_heads=2", "max_source_positions=20", "vocab_size=50258"],
            "WhisperForConditionalGeneration",
            {"input_features": "[1, 80, 40] float32", **dict.fromkeys(("decoder_input_ids", "labels"), "[1, 8] int64")},
        ),
        (
            ["hf:ViTConfig", "--batch-size", "2", "--image-size", "48", "--dtype", "bfloat16"]
            + ["--set", "hidden_size=48", "num_hidden_layers=1", "intermediate_size=64"],
            "ViTForImageClassification",
            {"pixel_values": "[2, 3, 48, 48] bfloat16", "labels": "[2] int64"},
        ),
    ],
)
def test_a_configuration_of_transformers_gets_its_head_and_inputs(arguments, name, inputs, capsys):
    pytest.importorskip("transformers")
    found = planned(capsys, *arguments)
    assert (found["class"], found["inputs"]) == (name, inputs)


def test_a_configuration_file_names_its_head(tmp_path, capsys):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    data = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 100, **sizes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    of_file = planned(capsys, f"hf:{path}", "--seq-len", "8")
    assert of_file["class"] == "BertForSequenceClassification" and of_file["inputs"]["labels"] == "[1] int64"
    of_folder = planned(capsys, f"hf:{tmp_path}", "--seq-len", "8", "--set", "num_hidden_layers=2")
    assert of_folder["parameters"] > of_file["parameters"]
    path.write_text(json.dumps({**data, "architectures": ["BertModel"]}))
    assert main(["plan", f"hf:{path}", "--seq-len", "8"]) == 2
    assert "no loss is known for BertModel" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_configuration_file_is_that_of_the_parameters_unless_another_is_given(name, tmp_path, capsys):
    pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", name: "bfloat16", **sizes}))
    options = [f"hf:{path}", "--seq-len", "8"]
    assert planned(capsys, *options)["dtype"] == "bfloat16"
    assert planned(capsys, *options, "--dtype", "fp32")["dtype"] == "float32"
    assert planned(capsys, *GPT2, "--dtype", "bf16")["dtype"] == "bfloat16"
    path.write_text(json.dumps({"model_type": "gpt2", name: "float8_e4m3fn", **sizes}))
    assert main(["plan", *options]) == 2
    assert "'float8_e4m3fn' is not a dtype" in capsys.readouterr().err


def test_configuration_fields_can_be_set_by_either_name(capsys):
    pytest.importorskip("transformers")
    found = planned(capsys, *GPT2, "num_hidden_layers=2", "n_positions=20")
    assert found["parameters"] == (100 + 20 + 2) * 32 + 2 * (12 * 32 * 32 + 13 * 32)


def test_a_model_larger_than_any_device_is_planned(capsys):
    """Weights of 4 PB: nothing of them can have been allocated."""
    found = planned(capsys, "transformer", "--seq-len", "64", "--set", "layers=1", "dim=8388608", "ff_dim=33554432")
    assert found["at_peak"]["parameters"] > 2**51


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ("{}", "has no model_type"),
        ('{"model_type": "gpt5"}', "'gpt5'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text, words, tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", f"hf:{path}", "--seq-len", "8"]) == 2
    err = capsys.readouterr().err
    assert words in err and str(path) in err and err.count("\n") == 1


def test_without_transformers_the_error_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", "hf:GPT2Config", "--seq-len", "8"]) == 2
    assert "pip install 'ackpt[hf]'" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_reported_before_planning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["plan", *BERT, "--output", str(tmp_path / "file" / "plan.json")]) == 2
    assert "--output: cannot write" in capsys.readouterr().err


def test_the_explanation_is_printed_and_written(tmp_path, capsys):
    page, snapshot = tmp_path / "page.html", tmp_path / "step.pickle"
    assert main(["plan", *BERT, "--explain", "--html", str(page), "--memory-viz", str(snapshot)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"written to {page}" in out and f"written to {snapshot}" in out
    assert "saved by module type" in out and "what would reduce the peak" in out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len(pickle.loads(snapshot.read_bytes())["segments"]) == 1


def test_the_explanation_as_json_adds_up(capsys):
    found = planned(capsys, *BERT, "--explain", "--device-profile", "t4")
    assert sum(line["bytes"] for line in found["saved"]) == found["saved_bytes"]
    assert sum(found["live_at_peak"].values()) == found["peak_bytes"]
    assert all(line["seconds"] > 0 for line in found["saved"])
    assert found["suggestions"] and all(s["saved_bytes"] > 0 for s in found["suggestions"])
    assert "saved" not in planned(capsys, *BERT)


def test_wrong_names_are_refused_before_slow_imports():
    code = (
        "import sys; from ackpt.cli import main\n"
        "for given in sys.argv[1:]: main(['plan', *given.split()])\n"
        "print([each for each in ('transformers', 'torch._dynamo', 'ackpt.planner.choose') if each in sys.modules])"
    )
    given = "lm --device-profile h300", "lmm --seq-len 8", "hf:GPT2Confg --seq-len 8", "hf:no-such.json --seq-len 8"
    given += ("resnet50",)
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=120)
    words = "device 'h300'", "unknown model 'lmm'", "no configuration class 'GPT2Confg'", "no-such.json cannot be read"
    words += ("run `python -m experiments plan resnet50` in a clone of the repository",)
    assert all(each in line for each, line in zip(words, done.stderr.splitlines(), strict=True))
    assert done.stdout == "[]\n"


def test_a_head_in_chunks_is_planned_from_shapes():
    fields = {"dim": 64, "ff_dim": 128, "layers": 1, "head_dim": 16, "vocab_size": 8192}
    config = PlanConfig(request("lm", seq_len=256, **fields), optimizer="none", device="t4", budget=0.5)
    with pytest.raises(ackpt.BudgetError):
        run_plan(config)
    found = run_plan(replace(config, chunk_head="auto"))
    assert found.plan.head_chunks > 1 and found.plan.schedule.graph == found.graph.hash
    assert found.plan.dynamic_peak_bytes <= 0.5 * found.plan.baseline_dynamic_peak_bytes
    assert all(storage.bytes % 512 == 0 for storage in found.graph.storages)  # as the allocator of a GPU rounds them
    assert not found.graph.on_cpu and found.memory is not None and found.memory.fits
    assert found.plan.note is not None and found.plan.note in plan_report.text(found)
