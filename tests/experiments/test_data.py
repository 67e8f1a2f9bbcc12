"""Data: corpora and where they come from, what is said when they cannot be had, tokens, packed batches."""

import os
import random
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import raises

from experiments import data
from experiments.data import DataError

ROWS = ["", " = Robert Boulter = \n", "", " Robert Boulter is an English actor . \n", " He was born ö \n"]
TEXT = "".join(ROWS)
BOTH_WAYS = r"local copy .* --dataset-path.* --dataset embedded"


def write(path, rows=ROWS, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({column: rows})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    return path


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(data.__file__).parent.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """Empty caches and no network; gives the two cache folders."""
    prepared, downloaded = tmp_path / "cache" / "datasets", tmp_path / "cache" / "hub"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", prepared)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(downloaded))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return prepared, downloaded


def test_the_embedded_corpus_is_the_same_in_every_python():
    """The sha256 that CPython 3.6 to 3.13 give."""
    text = data.embedded_corpus()
    assert text.splitlines()[:3] == ["SPACE", "EXCLAMATION MARK", "QUOTATION MARK"]
    assert len(text) == 354_743
    assert data.corpus_fingerprint(text) == "03ce3aea0397e841afdbafb4f732c6cb6fdca0bdb370d0a9cdbdbdcae33a3ee3"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("train-00000-of-00001.parquet", ""),
        ("train-00000-of-00001.parquet", "train-00000-of-00001.parquet"),
        ("wikitext-103-raw-v1/train-00000-of-00001.parquet", ""),
        ("some.arrow", ""),
        ("train/data-00000-of-00001.arrow", ""),
        ("wikitext-train.arrow", "wikitext-train.arrow"),
    ],
)
def test_a_local_copy_is_read(tmp_path, no_hub, name, given):
    write(tmp_path / name)
    assert data.wikitext_corpus(path=tmp_path / given) == TEXT
    assert data.wikitext_corpus(path=str(tmp_path / given), limit_chars=30) == TEXT[:30]


def test_splits_shards_and_configurations_are_told_apart(tmp_path, no_hub):
    for number, row in enumerate(ROWS):
        write(tmp_path / f"wikitext-103-raw-v1/train-0000{number}-of-00005.parquet", [row])
    write(tmp_path / "wikitext-103-raw-v1/test-00000-of-00001.parquet", ["test \n"])
    for other in ("wikitext-103-v1", "wikitext-2-raw-v1"):
        write(tmp_path / other / "train-00000-of-00001.parquet", ["wrong \n"])
    assert data.wikitext_corpus(path=tmp_path) == TEXT
    assert data.wikitext_corpus("test", path=tmp_path) == "test \n"
    with pytest.raises(DataError, match="no file of the validation split .* other splits"):
        data.wikitext_corpus("validation", path=tmp_path)
    with pytest.raises(DataError, match="no parquet or arrow file of wikitext-103-raw-v1"):
        data.wikitext_corpus(path=tmp_path / "wikitext-2-raw-v1")


@pytest.mark.parametrize(
    "name",
    [
        "datasets/Salesforce___wikitext/wikitext-103-raw-v1/0.0.0/b08601e/wikitext-train-0000{}-of-00002.arrow",
        "datasets/wikitext/wikitext-103-raw-v1/0.0.0/b08601e/wikitext-train-0000{}-of-00002.arrow",
        "hub/datasets--Salesforce--wikitext/snapshots/b08/wikitext-103-raw-v1/train-0000{}-of-00002.parquet",
    ],
)
def test_a_cache_is_used_when_it_is_complete(tmp_path, no_hub, name):
    write(tmp_path / "cache" / name.format(0), ROWS[:2])
    raises(DataError, BOTH_WAYS, data.wikitext_corpus)
    write(tmp_path / "cache" / name.format(1), ROWS[2:])
    assert data.wikitext_corpus() == TEXT


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_offline_the_error_names_both_alternatives_without_retries(tmp_path, environment):
    environment = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "NO_PROXY": "*", **environment}
    done = python("from experiments import data; data.token_stream('wikitext')", **environment)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert error.startswith("experiments.data.DataError: ")
    assert "--dataset-path" in error and "--dataset embedded" in error
    assert "Retry" not in done.stderr
    assert not list(tmp_path.rglob("*"))


def test_the_hub_is_streamed_up_to_the_limit(monkeypatch, no_hub):
    calls, read = [], []

    def load_dataset(**kwargs):
        calls.append(kwargs)
        return ({"text": read.append(row) or row} for row in ROWS)

    monkeypatch.setattr(data, "_require_hub", lambda config: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data.wikitext_corpus("test", limit_chars=22) == TEXT[:22]
    assert len(read) == 4
    asked = {"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1", "split": "test", "streaming": True}
    assert Path(calls[0].pop("cache_dir")).parts and calls[0] == asked


def test_batches_are_windows_of_the_stream_with_the_next_token_as_target():
    batches = list(data.packed_batches(torch.arange(1000), seq_len=16, batch_size=3, steps=5, seed=4))
    assert len(batches) == 5
    for batch in batches:
        assert batch.max_seqlen == 16
        assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens.tolist() == [0, 16, 32, 48]
        assert batch.tokens.shape == batch.targets.shape == (48,)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        windows = batch.tokens.view(3, 16)
        assert torch.equal(windows, windows[:, :1] + torch.arange(16))
        assert torch.equal(batch.targets, batch.tokens + 1)
    assert not torch.equal(batches[0].tokens, batches[1].tokens)


def test_batches_depend_on_their_seed_alone():
    def tokens(seed):
        batches = data.packed_batches(torch.arange(500), seq_len=8, batch_size=2, steps=4, seed=seed)
        return torch.stack([batch.tokens for batch in batches])

    torch.manual_seed(1)
    random.seed(1)
    first, state = tokens(7), torch.get_rng_state()
    torch.manual_seed(2)
    random.seed(2)
    assert torch.equal(first, tokens(7)) and not torch.equal(first, tokens(8))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


STREAM = torch.arange(10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.token_stream("wiki"), "unknown dataset 'wiki': choose one of embedded, wikitext"),
        (lambda: data.token_stream("embedded", path="somewhere"), "the embedded corpus takes no path"),
        (lambda: data.token_stream("embedded", limit_chars=0), "limit_chars must be at least 1, got 0"),
        (lambda: data.token_stream("embedded", vocab_size=255), "at least 256, one id per byte, got 255"),
        (lambda: data.wikitext_corpus("training"), "unknown split 'training': choose one of train, val"),
        (lambda: data.wikitext_corpus(limit_chars=-1), "limit_chars must be at least 1, got -1"),
        (lambda: data.packed_batches(STREAM, 0, 1, 1), "seq_len must be at least 1, got 0"),
        (lambda: data.packed_batches(STREAM, 1, -2, 1), "batch_size must be at least 1, got -2"),
        (lambda: data.packed_batches(STREAM, 1, 1, 0), "steps must be at least 1, got 0"),
        (lambda: data.packed_batches(STREAM, 10, 1, 1), "it has 10 tokens and a window needs 11"),
        (lambda: data.packed_batches(STREAM.float(), 2, 1, 1), "stream must be int64 of shape"),
        (lambda: data.packed_batches(STREAM[None], 2, 1, 1), r"got torch.int64 \[1, 10\]"),
    ],
)
def test_bad_arguments_are_named(call, message):
    raises(ValueError, message, call)
