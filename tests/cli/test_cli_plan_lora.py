"""``ackpt plan --lora``: adapters are trained, the model is frozen."""

import json
import re

import pytest
from test_cli_plan import planned

from ackpt.cli import main
from ackpt.planner.workloads.step_request import Lora

pytestmark = pytest.mark.usefixtures("captured_once")
pytest.importorskip("peft")
TINY = ["hf:LlamaConfig", "--seq-len", "16", "--set", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2"]
TINY += ["num_attention_heads=4", "num_key_value_heads=4", "vocab_size=100"]
ADAPTERS = 2 * 2 * 2 * (4 * 32)  # layers, targets, matrices of rank 4


def test_only_adapters_have_gradients_and_state(capsys):
    full, adapted = planned(capsys, *TINY), planned(capsys, *TINY, "--lora", "r=4", "targets=q_proj,v_proj")
    assert adapted["parameters"] - full["parameters"] == ADAPTERS
    counts = 2 * 2 * 2 * 4  # of steps, one for each matrix
    assert adapted["at_peak"]["optimizer"] == 2 * 4 * ADAPTERS + counts < full["at_peak"]["optimizer"]


def test_adapters_of_a_model_in_half_precision_are_in_float32(capsys):
    lora = ["--lora", "r=4", "targets=q_proj,v_proj", "--optimizer", "none"]
    half, own = (planned(capsys, *TINY, "--dtype", "bfloat16", *options) for options in ([], lora))
    assert own["at_peak"]["parameters"] - half["at_peak"]["parameters"] == 4 * ADAPTERS


def test_an_adapter_configuration_file_is_read(tmp_path):
    path = tmp_path / "adapter_config.json"
    fields = {"r": 8, "target_modules": ["o_proj"]}
    path.write_text(json.dumps({**fields, "peft_type": "LORA", "base_model_name_or_path": "x", "revision": None}))
    assert Lora.parsed([str(tmp_path)]) == Lora.parsed([str(path)]) == Lora(fields)


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        (TINY, ["r=4", "targets=query"], "peft refuses --lora: Target modules .*query.* not found in the base model"),
        (TINY, ["rank=4"], "--lora rank: peft's LoraConfig has no such field; it has .*target_modules"),
        (TINY, ["absent.json"], "--lora absent.json: write r=16 targets=q_proj,v_proj, or an adapter_config.json"),
        (["lm", "--seq-len", "16"], ["r=4"], "--lora adds adapters to models of transformers: give hf:..., not lm"),
    ],
)
def test_invalid_adapters_are_refused_in_one_line(capsys, model, lora, message):
    assert main(["plan", *model, "--lora", *lora]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error)
