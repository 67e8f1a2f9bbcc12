"""``ackpt plan`` with wrong options: one line that names cause and fix, and exit status 2."""

import re
import shlex

import pytest
from test_cli_plan import BERT, GPT2, LLAMA, LM

from ackpt.cli import main

pytestmark = pytest.mark.usefixtures("captured_once")
REFUSED = [  # the model, the other options, and what is said; ... is any text
    ([], "bert-base", "bert-base reads tokens: give --seq-len"),
    ([], "resnet18 --seq-len 8", "resnet18 reads images"),
    (BERT, "--image-size 8", "leave it out"),
    (BERT, "--batch-size 0", "--batch-size must be at least 1"),
    (BERT, "--seq-len 513", "512 positions of this configuration: give --set positions=513"),
    (BERT, "--set layer=3", "no such field; did you mean layers?"),
    (BERT, "--set layers", "write FIELD=VALUE"),
    (BERT, "--set layers=two", "layers must be a positive integer"),
    (BERT, "--set heads=3", "multiple of heads"),
    (BERT, "--dtype bfloat", "'bfloat' is not a dtype (did you mean 'bfloat16'?): choose from float32"),
    (BERT, "--budget 22G", "'22G' is not a budget (did you mean '22GiB' or '22GB'?)"),
    ([], "bert-bse --seq-len 8", "unknown model 'bert-bse' (did you mean 'bert-base'?)"),
    (BERT, "--policy Full", "'Full' is not a known policy (did you mean 'full'?): choose from none, full"),
    (BERT, "--device-profile H200", "'H200' (did you mean 'h200'?), only for h100-80g"),
    (BERT, "--device-profile t4 --autocast bfloat16", "'bfloat16' is not a known dtype of t4"),
    (BERT, "--budget 1.5", "at most 1, as in"),
    (BERT, "--output .", "is a folder"),
    ([], "hf:GPT2Confg --seq-len 8", "no configuration class 'GPT2Confg' (did you mean 'GPT2Config'?)"),
    ([], "hf:no-such.json --seq-len 8", "no-such.json cannot be read (No such file or directory): write hf:"),
    ([], "hf:GPT2Config", "give --seq-len"),
    ([], "hf:GPT2Config --seq-len 2048", "longer than the 1024 positions"),
    (GPT2, "n_layers=2", "did you mean n_layer"),
    (GPT2, "n_layer=two", "transformers refuses the configuration of GPT2Config"),
    (GPT2, "n_head=5", "transformers refuses the configuration of GPT2LMHeadModel"),
    ([], "hf:EncodecConfig --seq-len 8", "no head with a loss is known for model_type 'encodec'...--model FILE.py:F"),
    ([], "hf:Qwen2_5_VLConfig --seq-len 8", "'qwen2_5_vl'...: --model FILE.py:FUNCTION"),
    ([], "hf:WhisperConfig --seq-len 449", "longer than the 448 positions of this configuration"),
    (
        [],
        "hf:Speech2TextConfig --seq-len 8",
        "Speech2TextConfig has no max_source_positions or num_mel_bins; ...FILE.py:FUNCTION",
    ),
    ([], "sdxl-unet --image-size 1000", "sdxl-unet reads images whose size is a multiple of"),
    (LLAMA, "--optimizer lion", "the state of optimizer 'lion' is not known: choose from ...module:Class"),
    (LLAMA, "--optimizer adam", "'adam' is not known (did you mean 'adamw'?)"),
    (LLAMA, "--optimizer nowhere:Lion", "the module nowhere cannot be imported (No module named 'nowhere')"),
    (LLAMA, "--optimizer torch.nn:Linear", "torch.nn has no class Linear that is a torch.optim.Optimizer"),
    (LLAMA, "--optimizer torch.optim:Optimizer", "cannot be created from parameters alone"),
    (LLAMA, "--optimizer torch.optim:LBFGS", "the step of LBFGS cannot be simulated without data"),
    (LLAMA, "--optimizer none --grad-scaler", "belong to an optimizer's step: give --optimizer"),
    (LLAMA, "--optimizer adamw-8bit --clip-gradients", "adamw-8bit is known without --clip-gradients"),
    (LLAMA, "--grad-scaler --dtype float16", "torch does not unscale the gradient of ..., which is float16"),
    (LLAMA, "--every-n-layers 0", "every_n_layers must be a whole number of at least 1, got 0"),
    (LLAMA, "--save matmul", "got 'matmul' (did you mean 'matmuls'?)"),
    (LLAMA, "--offload-blocks", "--offload-blocks copies from a GPU to the host: give --device-profile"),
    (LLAMA, "--every-n-layers 2 --policy full", "are options of policy selective: leave out --policy full"),
    (LLAMA, "--device-profile t5", "no rates are known for device 't5'"),
    (LLAMA, "--quantize nf4", "--quantize nf4: ackpt plan makes no quantized weights...--model FILE.py:FUNCTION"),
    (LLAMA, "--fsdp 2 --policy rotor", "policy 'rotor' does not plan shards"),
    (GPT2, "--sweep seq=1:3", "--sweep seq=1:3: write batch_size, seq_len, image_size or device_profile"),
    (GPT2, "--sweep seq_len=8:4", "--sweep seq_len=8:4: write a range as in seq_len=1:64"),
    (GPT2, "--sweep seq_len=4 --explain", "--sweep prints one line per plan: leave out --explain"),
    (GPT2, "--sweep seq_len=4", "--sweep seq_len=4 gives the values of --seq-len: leave out --seq-len 16"),
    (GPT2, "--sweep batch-size=4,8 --batch-size 1", "leave out --batch-size 1"),
    (GPT2, "--sweep device_profile=t4,l4 --device-profile h200", "leave out --device-profile h200"),
    (GPT2, "--sweep seq_len=4 --fsdp 2", "--sweep prints one line per plan: leave out --fsdp"),
    (GPT2, "--largest batch_size", "--largest needs an amount of memory: give --device-profile, or --budget in bytes"),
    (GPT2, "--largest batch_size --budget 50%", "--largest needs an amount of memory"),
    (GPT2, "--largest batchsize --device-profile t4", "batch_size, seq_len, image_size (did you mean"),
    (GPT2, "--largest seq_len --sweep seq_len=4", "--largest is a sweep without an end: leave out --sweep"),
    (GPT2, "--slowdown -10%", "slowdown='-10%': give a fraction of the baseline's time from 0 to 1"),
    (GPT2, "--slowdown 10", "slowdown='10': give a fraction of the baseline's time"),
    (GPT2, "--slowdown 10% --policy full", "slowdown= without a budget is for policy 'auto'"),
    (GPT2, "--slowdown 10% --fsdp 2", "--fsdp plans each block within a budget: leave out --slowdown"),
    (GPT2, "--budget '1GiB reserved'", "bounds what a GPU's allocator reserves: give bytes and --device-profile"),
    (GPT2, "--fsdp 2 --accumulation", "--fsdp plans allocated bytes of a step without earlier gradients"),
    (LM, "--fsdp 0", "--fsdp 0: shard over at least 2 ranks"),
    (LM, "--fsdp 2 --budget 1kB", "on a rank, policy 'auto' cannot keep the budget '1kB'"),
    (LM, "--fsdp 2 --shard-dtype int4", "--shard-dtype 'int4' is not a dtype"),
    (LM, "--reduce-dtype float32", "--reduce-dtype says how --fsdp shards: give --fsdp as well"),
    (LM, "--fsdp 2 --output plan.json", "not one of the whole step: leave out --output; --json prints"),
    (LM, "--fsdp 2x1", "--fsdp 2x1: shard over at least 2 ranks"),
    (LM, "--fsdp 2x2x2", "--fsdp 2x2x2: write the number of ranks, such as 8, or replicas x ranks"),
    (LM, "--fsdp 2 --fsdp-version 1.13", "--fsdp-version 1.13: give a version of torch that has FSDP2"),
    (LM, "--fsdp 2 --grad-scaler", "leave out --grad-scaler, --offload-blocks"),
    (LM, "--fsdp 2 --hold-outputs --chunk-head", "leave out one of them"),
    (LM, "--fsdp 2 --save all", "save must be one of inputs, matmuls, every-second-matmul"),
    (LM, "--keep-last-block", "--keep-last-block says how --fsdp shards"),
    (LM, "--allocator expandable_segments:True", "--allocator has settings of a GPU's allocator"),
    (LM, "--model model.py:make", "give MODEL, such as hf:GPT2Config, or --model FILE.py:FUNCTION, and not both"),
    (LLAMA, "--lora r=4 targets=query", "peft refuses --lora: Target modules ...query... not found in the base model"),
    (LLAMA, "--lora rank=4", "--lora rank: peft's LoraConfig has no such field; it has ...target_modules"),
    (LLAMA, "--lora absent.json", "--lora absent.json: write r=16 targets=q_proj,v_proj, or an adapter_config.json"),
    ([], "lm --seq-len 16 --lora r=4", "--lora adds adapters to models of transformers: give hf:..., not lm"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSED)
def test_wrong_options_print_one_line_and_exit_with_status_2(model, options, message, capsys, tmp_path, monkeypatch):
    arguments = [*model, *shlex.split(options)]
    if arguments[0].startswith("hf:"):
        pytest.importorskip("transformers")
    if "--lora" in arguments:
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ackpt plan: ") and err.count("\n") == 1
    assert re.search(re.escape(message).replace(re.escape("..."), ".*"), err), err
