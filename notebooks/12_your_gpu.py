# %% [markdown]
# # Run it on your GPU
#
# This page checks the promises of `ackpt` on the machine that runs it: a GPU if there is one, otherwise the CPU. To run
# it on Colab's free GPU, open the notebook by the badge below, choose a GPU as the runtime's type, and then *Run all*.
# In a terminal, `ackpt selftest` does the same.

# %%
import torch

from ackpt.experiments.selftest import SelftestConfig, failed, run_selftest, text_table

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch.set_num_threads(2)

# %% [markdown]
# A small language model takes the same training step in four ways: as it is, with a checkpointed region around every
# block, with regions whose inputs are offloaded to host memory, and planned within half of the baseline's peak. The
# peaks are predicted before anything runs.

# %%
record = run_selftest(SelftestConfig(device), "notebooks/12_your_gpu.py")

# %% [markdown]
# Every check must pass. Gradients must equal the baseline's, bit for bit. On a CPU, predicted and measured peaks are
# equal to the byte. On a GPU they may differ by 2 %, since libraries allocate workspaces of their own.

# %%
for check in record.metrics["checks"]:
    print("passed" if check["passed"] else "FAILED", "", check["check"])
assert failed(record) == []

# %% [markdown]
# The table adds the times. *Expected* is the planner's estimate from the rates of the device, relative to the baseline;
# *measured* is the median of interleaved steps.

# %% tags=["measured-time", "nbval-ignore-output"]
print(text_table(record))

# %% [markdown]
# ## Records of the published experiments
#
# The book has columns for results that were recorded on a GPU. To make these records on yours, run
#
# ```bash
# ackpt gpu-suite --out results/gpu
# ```
#
# It runs the published experiments in order of importance and writes a record after each, with the machine, the
# versions, the date and the commit. `--minutes` limits the time; the next call continues where the last one ended. The
# tables read the new records when `nox -s reproduce` runs.
