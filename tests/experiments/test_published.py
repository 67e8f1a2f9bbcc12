"""Published measurements on GPUs against predictions from shapes: bytes, ratios of times, and the published models."""

import contextlib
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ackpt
from experiments import predicted_curves
from experiments.cli.command_line import main
from experiments.published import STEPS, predictions, reference, time_ratios
from experiments.published.block_bytes import saved_per_token, with_fused_norms
from experiments.published.predictions import Predictions, all_predicted, excluded, predicted_bytes, rows
from experiments.published.reference import Block, InnerBackward, KeptInput
from experiments.published.report import badge, reasons, summary, summary_table, text_table, worst
from experiments.published.time_ratios import METHODS, Times, compared, table
from experiments.results import load_reference

EXACT = ("cross-entropy", "kl-divergence", "jensen-shannon", "total-variation", "layer-norm", "llama-rms-norm")


def predicted(*steps):
    stored = Predictions()
    return [stored.of(row) for row in rows() if row["step"] in steps]


def test_every_row_is_predicted_or_says_why_not():
    everything = load_reference(predictions.REFERENCE)["rows"]
    assert len(everything) == len(rows()) + len(excluded())
    for row in everything:
        assert bool(row["step"]) != bool(row["excluded"]) and (row["excluded"] or row["step"] in STEPS)
        assert row["bytes"] > row["rounding"] > 0 and ":" in row["url"] and "@" in row["url"]
    assert all(len(row["excluded"]) > 20 and row.get("figures", 1) > 0 for row in excluded())


def test_all_stored_predictions_are_those_of_this_code():
    """After a change of what predicts: run `python -m experiments published`, and `nox -s reproduce -- --only 11`."""
    stored = Predictions()
    assert {stored.key(row) for row in rows()} == set(stored.stored)


@pytest.mark.parametrize("step", [*EXACT, "softmax", "linear-layers", "gated-mlp"])
def test_rows_predicted_now_equal_the_stored_predictions(step):
    row = min((row for row in rows() if row["step"] == step), key=lambda row: row["bytes"])
    assert Predictions().of(row)["predicted"] == predicted_bytes(*predictions.group(row))[row["metric"]]


def test_losses_and_norms_are_exact():
    """Their figures follow from the sizes of tensors alone.

    But for one: a benchmark of 1024 rows begins with the blocks of another one, which the prediction does not know.
    """
    found = predicted(*EXACT)
    assert {row["step"] for row in found} == set(EXACT)
    (line,) = summary(found, "metric")
    assert line["metric"] == "allocated" and line["n"] - 1 == line["exact"] > 50
    assert text_table(found).endswith(
        f"{line['n']} figures, {line['exact']} exact, median error 0.000%, largest +0.160%"
    )


@dataclass
class Counting:
    """Predicts ten times the rows of a loss, and counts."""

    calls: int = 0

    def __call__(self, step, sizes, gpu):
        self.calls += 1
        return {"allocated": 10 * sizes["rows"], "NVML": 10 * sizes["rows"]}


ROW = {"step": "cross-entropy", "sizes": {"rows": 8, "vocabulary": 2}, "gpu": "t4", "metric": "allocated", "bytes": 40}


class TestStoredPredictions:
    def test_a_row_is_predicted_once(self, tmp_path):
        counting = Counting()
        first = Predictions(tmp_path / "file.json", counting)
        assert first.of(ROW)["predicted"] == 80 and first.of(ROW)["error"] == 1.0
        first.save([ROW])
        assert Predictions(tmp_path / "file.json", counting).of(ROW)["predicted"] == 80
        assert counting.calls == first.predicted == 1
        assert Predictions(tmp_path / "file.json", counting).of(ROW, repeat=True)["predicted"] == 80
        assert counting.calls == 2

    @pytest.mark.parametrize("change", [{"gpu": "l4"}, {"sizes": {"rows": 9, "vocabulary": 2}}, {"step": "softmax"}])
    def test_every_input_of_a_prediction_changes_its_key(self, change):
        stored = Predictions()
        assert stored.key({**ROW, **change}) != stored.key(ROW)
        assert stored.key({**ROW, "metric": "reserved", "bytes": 1}) == stored.key(ROW)

    def test_changed_code_is_predicted_again_and_old_predictions_are_dropped(self, tmp_path, monkeypatch):
        counting, file = Counting(), tmp_path / "file.json"
        before = Predictions(file, counting)
        before.of(ROW)
        before.save([ROW])
        monkeypatch.setattr(predictions, "code_version", lambda step: "new")
        after = Predictions(file, counting)
        after.of(ROW)
        after.save([ROW])
        assert counting.calls == 2 and list(Predictions(file).stored) == [after.key(ROW)] != [before.key(ROW)]

    def test_new_predictions_are_reported_and_stored(self, tmp_path):
        lines = []
        found = all_predicted(("linear-layers",), file=tmp_path / "file.json", report=lines.append)
        assert len(found) == 3 and len(lines) == 2  # two metrics of one step
        assert all_predicted(("linear-layers",), file=tmp_path / "file.json", report=lines.append) == found
        assert len(lines) == 2
        all_predicted(("linear-layers",), True, tmp_path / "file.json", lines.append)
        assert len(lines) == 4


def test_tables_and_badge():
    found = predicted("softmax", "linear-layers")
    table = summary_table(found, "source", caption="Errors.", name="tab-x")
    assert "| Liger-Kernel | 12 | 12 | 0.00 | +0.00 |" in table
    made = [{**found[0], "error": 0.5, "source": "a paper"}, *found]
    assert [row["error"] for row in worst(made, 0.1)] == [0.5]
    sentence = badge(made, "there")
    errors = "median error 0.00 %, largest +50.0 %"
    assert sentence.startswith(f"{{doc}}`predicted; validated on 16 published measurements, {errors} <there>`")
    assert "(1 of them of whole training steps: median error 50.0 %, largest +50.0 %; 3 sources)" in sentence
    assert badge(made[:1], "there").endswith("(1 of them of whole training steps; 1 sources)\n")
    listed = reasons(excluded())
    assert sum(entry["n"] for entry in listed) == sum(row.get("figures", 1) for row in excluded())
    assert [entry["n"] for entry in listed] == sorted((entry["n"] for entry in listed), reverse=True)


def test_the_command_prints_the_figures_of_a_step(capsys):
    assert main(["published", "--step", "softmax"]) == 0
    assert "allocated: 12 figures, 12 exact" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft calls it
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_fine_tuning_step_has_the_published_metrics(attention):
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "ff": 128, "vocabulary": 256, "tied": True}
    sizes |= {"batch": 1, "length": 128, "rank": 4, "attention": attention}
    found = predicted_bytes("lora-causal-lm", sizes, "t4")
    assert found["allocated, start"] < found["allocated, optimizer"] <= found["allocated"] <= found["reserved"]


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft calls it
def test_a_causal_step_keeps_gradients_and_attends_with_a_mask():
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "ff": 128, "vocabulary": 256, "tied": True}
    sizes |= {"batch": 1, "length": 128}
    full, adapted = (predicted_bytes("causal-lm", {**sizes, **options}, "rtx3090") for options in ({}, {"rank": 4}))
    eager = predicted_bytes("causal-lm", {**sizes, "attention": "eager"}, "rtx3090")
    assert eager["allocated, start"] == full["allocated, start"] < adapted["allocated, start"]
    assert adapted["allocated"] < full["allocated"] < eager["allocated"]


LAYER = {"width": 64, "heads": 4, "batch": 2, "length": 32, "ranks": 2}
ROW_RATIOS = {"step": "megatron-layer", "gpu": "a100-80g", "method": "checkpointing", "against": "baseline"}
ROW_RATIOS |= {"unit": "ms", "source": "nobody", "what": "a layer", "figures": [4, 3], "sizes": {**LAYER, "blocks": 1}}


def seconds(method: str, **sizes) -> float:
    return time_ratios._seconds("megatron-layer", "a100-80g", method, {**LAYER, **sizes})


def test_rows_are_complete():
    rows = load_reference(time_ratios.REFERENCE)["rows"]
    assert len(rows) >= 10 and len({row["source"] for row in rows}) >= 3
    for row in rows:
        assert {row["method"], row["against"]} <= set(METHODS) and row["url"]
        assert row["unit"] in ("s", "ms", "tokens/s") and min(row["figures"]) > 0


@pytest.mark.parametrize("method", ["baseline", "checkpointing", "every second layer", "attention core recomputed"])
def test_two_and_four_blocks_give_the_time_of_any_number(method, monkeypatch):
    six = seconds(method, blocks=6)
    monkeypatch.setattr(time_ratios, "MORE", 6)
    assert six == pytest.approx(seconds(method, blocks=6), rel=1e-9)


def test_recomputation_costs_at_most_a_forward():
    baseline, core, every = (seconds(m, blocks=1) for m in ("baseline", "attention core recomputed", "checkpointing"))
    assert baseline < core < every < 1.5 * baseline
    assert seconds("every second layer", blocks=2) == pytest.approx(baseline + every)


def test_a_ratio_and_its_error(tmp_path):
    found = compared(ROW_RATIOS, Times(tmp_path / "times.json"))
    assert found["ratio"] == 4 / 3 and found["error"] == pytest.approx(found["predicted"] / (4 / 3) - 1)
    rates = compared({**ROW_RATIOS, "unit": "tokens/s", "figures": [3, 4]}, Times(tmp_path / "times.json"))
    assert (rates["ratio"], rates["predicted"]) == (4 / 3, found["predicted"])
    large = {**found, "error": -0.2}
    tables = [table([row], "A caption.", "a-name") for row in (large, {**found, "error": 0.1})]
    assert "| **-20.0** |" in tables[0] and "**" not in tables[1]


def test_no_published_ratio_is_far_off():
    """The claim of the chapter; predictions of other code are made again, which takes a minute."""
    times = Times()
    found = [compared(row, times) for row in load_reference(time_ratios.REFERENCE)["rows"]]
    assert sum(abs(row["error"]) <= 0.05 for row in found) >= 0.7 * len(found)
    assert max(abs(row["error"]) for row in found) < 0.25


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


def predicted_steps(step):
    stored = Predictions()
    return [stored.of(row) for row in rows() if row["step"] == step]


def test_the_language_model_is_predicted_within_the_allocators_remainders():
    found = predicted_steps("reference-language-model")
    assert len(found) == 6 and max(abs(row["error"]) for row in found) < 0.0002


def test_the_synthetic_experiment_is_predicted_to_two_blocks_of_the_allocator():
    found = {
        (row["sizes"]["method"], row["sizes"]["tokens"]): row["predicted"] - row["bytes"]
        for row in predicted_steps("reference-synthetic")
    }
    assert len(found) == 10
    assert max(abs(difference) for (method, _), difference in found.items() if method == "checkpoint") <= 512
    assert max(abs(difference) for difference in found.values()) <= 1024


def test_the_offload_experiment_is_predicted_within_2_percent():
    found = predicted_steps("reference-offload")
    assert len(found) == 4 and max(abs(row["error"]) for row in found) < 0.02


def test_the_resnet_lacks_the_workspaces_of_convolutions():
    found = {row["sizes"]["batch"]: row["error"] for row in predicted_steps("reference-resnet")}
    assert sorted(found) == [4, 8, 16, 32, 64] and all(error < 0 for error in found.values())
    assert min(found.values()) > -0.03 and min(found[batch] for batch in (16, 32, 64)) > -0.01


in_short_sequences = partial(reference.attend_in_a_loop, lengths=(3, 5))


def test_attention_in_a_loop_attends_within_each_sequence():
    qkv = torch.randn(8, 3, 2, 4)
    parts = [F.scaled_dot_product_attention(*piece.permute(1, 2, 0, 3)).transpose(0, 1) for piece in qkv.split([3, 5])]
    torch.testing.assert_close(in_short_sequences(qkv, torch.empty(3)), torch.cat(parts))


OFFLOADS = ("ckpt_classic", "ckpt_sync_offload", "ckpt_async_offload")


@pytest.mark.parametrize("checkpoint", ["inner", *OFFLOADS])
def test_checkpointed_blocks_have_the_gradients_of_the_block(checkpoint):
    torch.manual_seed(0)
    block = Block(8, 16, 4, in_short_sequences)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, offsets = torch.randn(8, 8, requires_grad=True), torch.empty(3)
    block(x, offsets).sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in block.parameters())]
    x.grad = None
    block.zero_grad()
    if checkpoint == "inner":
        InnerBackward.apply(block, x, offsets).sum().backward()
    else:
        KeptInput.apply(block, x, offsets, checkpoint).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in block.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


TINY = {"width": 128, "ff": 256, "layers": 3, "vocabulary": 300, "lengths": (24, 40), "depths": (1, 1, 2, 1)}
BUILD = reference.Build(**TINY, image=32, attend=reference.attend_for_real)
REFERENCES = {
    **{f"reference-{name}": ({"tokens": 64}, ("baseline", "checkpoint")) for name in ("synthetic", "language-model")},
    "reference-offload": ({}, ("baseline", *OFFLOADS)),
    "reference-resnet": ({"batch": 2}, (None,)),
}


@pytest.mark.parametrize(
    "step, method", [(step, each) for step, (_, methods) in REFERENCES.items() for each in methods]
)
@pytest.mark.usefixtures("one_thread")
def test_the_published_models_run_and_their_bytes_are_the_predicted_ones(step, method):
    sizes = REFERENCES[step][0] | ({"method": method} if method else {})
    with FakeTensorMode():
        shapes = STEPS[step](**sizes, build=BUILD)
    torch.manual_seed(0)
    real = STEPS[step](**sizes, build=BUILD)
    real.run()
    assert all(p.grad.isfinite().all() for p in real.resident[0].parameters())  # float16 weights may overflow later
    predicted_steps = ackpt.predict(shapes.run, resident=shapes.resident, warmup=1)
    measured = ackpt.measure(real.run, resident=real.resident, warmup=1, repeats=0)
    assert predicted_steps.peak_bytes == measured.peak_bytes


class OnAGpu(TorchFunctionMode):
    """Inside, every tensor says that it is on a GPU, and `calls` are those of streams, copies and pinned memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func is torch.Tensor.cpu:
            return self.calls.append("copy and wait") or args[0].clone()
        if func is torch.Tensor.copy_:
            self.calls.append("copy" if kwargs.get("non_blocking") else "copy and wait")
        if kwargs.pop("pin_memory", False):
            self.calls.append("pin")
        return func(*args, **kwargs)

    def noted(self, *words):
        return lambda *_: self.calls.append(" ".join(words)) or "event"


@pytest.mark.parametrize(
    "method, out, back",
    [
        ("ckpt_classic", [], []),
        ("ckpt_sync_offload", ["copy and wait"], ["copy and wait"]),
        (
            "ckpt_async_offload",
            ["pin", "side waits for compute", "side", "copy", "side records", "source recorded"],
            ["compute waits for side", "copy"],
        ),
    ],
)
def test_block_inputs_leave_a_gpu_on_their_own_stream(method, out, back, monkeypatch):
    with OnAGpu() as gpu:
        side = SimpleNamespace(wait_stream=gpu.noted("side waits for compute"), record_event=gpu.noted("side records"))
        compute = SimpleNamespace(wait_event=gpu.noted("compute waits for side"))
        monkeypatch.setattr(reference, "side_stream", lambda: side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(gpu.noted("side")()))
        monkeypatch.setattr(torch.Tensor, "record_stream", gpu.noted("source recorded"))
        x = torch.arange(6.0).view(2, 3)
        kept = reference.Kept(x, method)
        assert gpu.calls == out
        gpu.calls.clear()
        again = kept.on_device(torch.empty(4))
    assert gpu.calls == back and torch.equal(again, x) and (again is x) == (method == "ckpt_classic")


def test_plans_of_the_curves_have_the_peak_of_per_block_checkpointing(monkeypatch):
    sizes = {"dim": 32, "ff_dim": 64, "layers": 3, "head_dim": 16, "vocab_size": 32}
    monkeypatch.setitem(predicted_curves.MODELS, "lm", {"seq_len": 64, "fields": sizes})
    found = predicted_curves.predicted_methods("lm", {"batch": 8}, "h100-80g")
    assert [*found] == ["without", "per-block", "mu-two", "auto"]
    assert found["auto"]["peak_bytes"] <= found["per-block"]["peak_bytes"] < found["without"]["peak_bytes"]
    assert found["without"]["seconds"] < found["auto"]["seconds"] <= found["per-block"]["seconds"]
