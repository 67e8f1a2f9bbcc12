# %% [markdown]
# # Run it on your GPU
#
# **Do the guarantees hold on your machine?**
#
# This page checks some {doc}`guarantees <../guarantees>` on a GPU if there is one, otherwise on the CPU. The outputs
# below are those of a CPU. To use Colab's free GPU, open the notebook with the Colab badge, select a GPU runtime, and
# choose *Run all*. In a terminal, `ackpt selftest` does the same.

# %% tags=["hide-input"]
import torch

from ackpt.cli.selftest import failed, run_selftest, text_of
from experiments.reports.gpu_suite import FIT_COLUMNS, fit_rows
from experiments.results import load_records, markdown_table, write_text_atomic

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch.set_num_threads(2)

# %% [markdown]
# A small language model runs the same training step in four ways: as the baseline, with a checkpointed region around
# every block, with regions whose inputs are offloaded to host memory, and planned within half of the baseline's peak.
# The peaks are predicted before anything runs.

# %%
record = run_selftest(device, "notebooks/12_your_gpu.py")

# %% [markdown]
# No check may fail. Gradients must equal the baseline's, bit for bit. The baseline runs twice, with deterministic
# algorithms, and gradients that differ between its two runs are not compared. On a CPU, predicted and measured peaks are
# equal to the byte. On a GPU, libraries allocate workspaces of their own, so a difference of more than 2 % is a warning.

# %% tags=["measured-time", "nbval-ignore-output"]
print(text_of(record))
assert failed(record) == []

# %% [markdown]
# ## Records of the published experiments
#
# {doc}`04_logits`, {doc}`08_mu_two`, {doc}`09_frontier` and {doc}`14_published` show predictions for published
# experiments. On a GPU, they also run these, the longest sequences first, and show our measurements in the columns *on
# a GPU*. On Colab, open a chapter with its badge. To run all chapters on your own GPU:
#
# ```bash
# nox -s reproduce -- --device cuda --minutes 60
# ```
#
# Each of these chapters has a cell with the parameters `device` (`"auto"`, `"cpu"` or `"cuda"`), `tier` (`"auto"`,
# `"t4"` for fp16, `"full"`, or `"cpu"` for nothing), `dataset` (`"embedded"` or `"wikitext"`) and `minutes`. A GPU below
# compute capability 8.0, such as a T4, has no attention kernel for bf16, so it runs fp16 with a scaled loss. The table
# shows what fits your GPU:

# %% tags=["hide-input"]
rows = fit_rows(load_records("results/cpu"))
caption = (
    "Which published configurations fit, predicted: the largest peak of our methods, and the time of all methods at 40 % "
    "of the rates of the data sheets. One method at a time is in memory."
)
path = write_text_atomic("results/tables/12_fits.md", markdown_table(rows, FIT_COLUMNS, caption, "tab-fits"))

# %% [markdown]
# ```{include} ../../results/tables/12_fits.md
# ```
#
# On a machine that has numpy, torch and transformers, you can run the same experiments without an installation, in a
# clone of the repository:
#
# ```bash
# python -m experiments gpu-suite --out results/gpu --minutes 8
# ```
#
# The most important experiments run first. The command writes a record with machine, versions, date and commit after
# each run, and stops at the time limit; the next call continues. To run a single experiment, use
# `python -m experiments` with `synthetic`, `lm`, `offload`, `batch-size`, `bert` or `frontier` and `--out results/gpu`;
# `--help` lists their options. To see a trace of one experiment, with kernels and memory, in TensorBoard:
#
# ```bash
# pip install -e ".[profile]"
# python -m experiments lm --profile-dir traces
# tensorboard --logdir traces
# ```
#
# {doc}`../status` says which tables have no such records yet.
