"""Text, tokens and packed batches for the language-model experiment.

Two corpora: "embedded", the names of Unicode's characters as every Python holds them (`unicodedata`, about 0.35
MB: no network, no package), and "wikitext" (wikitext-103-raw-v1, streamed through `datasets` or read from a local
copy). Neither silently replaces the other. Nothing is cached on disk, except by `datasets` itself.
"""

import contextlib
import dataclasses
import hashlib
import http.client
import importlib
import os
import re
import sys
import tempfile
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DATASETS",
    "Batch",
    "DataError",
    "corpus_fingerprint",
    "embedded_corpus",
    "packed_batches",
    "token_stream",
    "train_tokenizer",
    "wikitext_corpus",
]

#: What `token_stream` takes.
DATASETS = ("embedded", "wikitext")
WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")  # "wikitext" redirects to the first
SPLITS = ("train", "validation", "test")
LIMIT_CHARS = 20_000_000  # more than 500 steps of 8192 tokens read
KINDS = (".parquet", ".arrow")
# other configurations of the repository, and files that `datasets` stores next to the data
NOT_THE_DATA = re.compile(r"/(wikitext-(2-raw-v1|2-v1|103-v1)/|cache-[^/]*$|[^/]*\.incomplete/)")
NAMED_BY_CODE = ("CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH", "HANGUL SYLLABLE")
BYTES = 256  # the alphabet of a byte-level tokenizer
PROBE_SECONDS = 5.0
WAYS_OUT = (
    "give a local copy (a folder with its parquet or arrow files) by path= or --dataset-path, "
    "or take the corpus that needs no network by --dataset embedded"
)


class DataError(RuntimeError):
    """A corpus is not available here; the message says why, and what to do.

    Example:
        >>> try:
        ...     wikitext_corpus("validation", path="/no/such/folder")
        ... except DataError:
        ...     print("no copy there, and the embedded corpus does not stand in for it")
        no copy there, and the embedded corpus does not stand in for it
    """


def embedded_corpus() -> str:
    """The names of the characters of Unicode 3.2, one per line, in the order of their code points.

    The names that contain a code point or a syllable instead of words (Chinese, Japanese and Korean characters)
    are left out. Names of characters never change, so every version of Python gives the same 354,743 characters.

    Example:
        >>> embedded_corpus().splitlines()[:2]
        ['SPACE', 'EXCLAMATION MARK']
    """
    characters = unicodedata.ucd_3_2_0
    names = (characters.name(chr(code), "") for code in range(sys.maxunicode + 1))
    return "\n".join(name for name in names if name and not name.startswith(NAMED_BY_CODE))


def corpus_fingerprint(text: str) -> str:
    """The sha256 of a corpus in UTF-8, 64 hexadecimal digits.

    Example:
        >>> corpus_fingerprint("")[:12]
        'e3b0c44298fc'
    """
    return hashlib.sha256(text.encode()).hexdigest()


def wikitext_corpus(
    split: str = "train", path: str | os.PathLike[str] | None = None, limit_chars: int = LIMIT_CHARS
) -> str:
    """The first `limit_chars` characters of a split of wikitext-103-raw-v1.

    Looked for in `path` (a parquet or arrow file, or a folder that holds some) if given, else in the cache of
    `datasets`, else streamed from the Hugging Face hub. Raises ValueError for an unknown split or a limit
    below 1, DataError if the text is not available. Source: Merity et al. 2016, arXiv:1609.07843.

    Example:
        >>> try:
        ...     wikitext_corpus(path="/no/such/folder")
        ... except DataError as error:
        ...     print(error)
        not a folder, a parquet file or an arrow file: /no/such/folder
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    _check_limit(limit_chars)
    datasets = _package("datasets")
    files = _cached_files(datasets, split) if path is None else _local_files(Path(path), split)
    if not files:
        _require_hub(datasets.config)
    where = str(files[0].parent) if files else "the Hugging Face hub"
    try:
        # the folder takes the lock files that datasets writes even when it only streams
        with tempfile.TemporaryDirectory() as folder, _few_retries(datasets.config):
            if files:
                kind = "parquet" if files[0].suffix == ".parquet" else "arrow"
                source = {"path": kind, "data_files": [str(file) for file in files], "split": "train"}
            else:
                source = {"path": WIKITEXT[0], "name": WIKITEXT[1], "split": split}
            rows = datasets.load_dataset(**source, streaming=True, cache_dir=folder)
            text = _take((row["text"] for row in rows), limit_chars)
    except KeyError as error:
        raise DataError(f"not a copy of wikitext, it has no column {error}: {where}") from error
    except (OSError, ValueError, EOFError, datasets.exceptions.DatasetsError, *_http_errors()) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"cannot read wikitext from {where} ({reason}): {WAYS_OUT}") from error
    if not text:
        raise DataError(f"no text in the {split} split of wikitext from {where}: {WAYS_OUT}")
    return text


def _check_limit(limit_chars: int) -> None:
    if limit_chars < 1:
        raise ValueError(f"limit_chars must be at least 1, got {limit_chars}")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f'this needs the package {name} ({error}): pip install "ackpt[lm]"') from error


def _local_files(path: Path, split: str) -> list[Path]:
    """The parquet or arrow files of one split of wikitext-103-raw-v1 in a folder; a file stands alone."""
    if path.is_file() and path.suffix in KINDS:
        return [path]
    if not path.is_dir():
        raise DataError(f"not a folder, a parquet file or an arrow file: {path}")
    names = {file: file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.suffix in KINDS}
    files = [file for file, name in names.items() if not NOT_THE_DATA.search(f"/{path.name}/{name}")]
    if not files:
        raise DataError(f"no parquet or arrow file of {WIKITEXT[1]} in {path}")
    splits = {file: [s for s in SPLITS if re.search(rf"(^|[-_./]){s}[-_./]", names[file])] for file in files}
    if any(splits.values()):
        files = [file for file in files if split in splits[file]]
    if not files:
        raise DataError(f"no file of the {split} split in {path}: its files are named for other splits")
    # one folder and one kind: a cache may hold the same text twice
    return [file for file in files if (file.parent, file.suffix) == (files[0].parent, files[0].suffix)]


def _cached_files(datasets: Any, split: str) -> list[Path]:
    """The files of a split that an earlier download left complete in a Hugging Face cache, else none."""
    prepared = Path(datasets.config.HF_DATASETS_CACHE)
    downloaded = Path(_package("huggingface_hub").constants.HF_HUB_CACHE)
    for repository in (WIKITEXT[0], "wikitext"):
        for folder in (
            prepared / repository.replace("/", "___"),
            downloaded / f"datasets--{repository}".replace("/", "--"),
        ):
            with contextlib.suppress(DataError):
                files = _local_files(folder, split)
                shards = re.search(r"-of-(\d+)", files[0].name)
                if shards is None or len(files) == int(shards[1]):
                    return files
    return []


def _require_hub(config: Any) -> None:
    """Raise DataError at once where the hub cannot be reached: `datasets` alone would retry for minutes."""
    if config.HF_HUB_OFFLINE:
        raise DataError(f"wikitext is not cached here and HF_HUB_OFFLINE is set: {WAYS_OUT}")
    try:
        request = urllib.request.Request(config.HF_ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answered
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DataError(f"no connection to {config.HF_ENDPOINT} ({error}): {WAYS_OUT}") from error


@contextlib.contextmanager
def _few_retries(config: Any) -> Iterator[None]:
    """Let `datasets` reconnect twice while streaming, not 20 times 5 seconds."""
    names = ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES")
    before = {name: getattr(config, name) for name in names if hasattr(config, name)}
    for name, retries in before.items():
        setattr(config, name, min(2, retries))
    try:
        yield
    finally:
        for name, retries in before.items():
            setattr(config, name, retries)


def _http_errors() -> list[type[Exception]]:
    """What the HTTP clients below `datasets` raise that is no OSError."""
    names = {"httpx": "HTTPError", "httpx2": "HTTPError", "aiohttp": "ClientError"}
    return [getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules]


def _take(texts: Iterable[str], limit_chars: int) -> str:
    pieces, length = [], 0
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"the column 'text' holds {type(text).__name__}, not text")
        pieces.append(text)
        length += len(text)
        if length >= limit_chars:
            break
    return "".join(pieces)[:limit_chars]


def train_tokenizer(text: str, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (`tokenizers.Tokenizer`) with at most `vocab_size` ids, trained on `text`.

    The same text gives the same tokenizer in every process; a text too short for `vocab_size` merges gives
    fewer ids. Raises ValueError for a vocabulary below the 256 bytes, DataError where `tokenizers` is
    missing. Source: Sennrich et al. 2016, arXiv:1508.07909.

    Example:
        >>> tokenizer = train_tokenizer("to be or not to be", vocab_size=260)
        >>> tokenizer.get_vocab_size() <= 260, tokenizer.decode(tokenizer.encode("or not").ids)
        (True, 'or not')
    """
    if vocab_size < BYTES:
        raise ValueError(f"vocab_size must be at least {BYTES}, one id per byte, got {vocab_size}")
    tokenizers = _package("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def token_stream(
    dataset: str = "embedded",
    vocab_size: int = 4096,
    path: str | os.PathLike[str] | None = None,
    limit_chars: int = LIMIT_CHARS,
) -> Tensor:
    """A corpus as one row of token ids, int64 [N], each below `vocab_size`.

    The tokenizer is trained on the corpus itself. Raises ValueError for an unknown dataset, a `path` given
    with the embedded corpus, and whatever `wikitext_corpus` and `train_tokenizer` raise.

    Example:
        >>> stream = token_stream("embedded", vocab_size=512, limit_chars=10_000)
        >>> stream.dtype, int(stream.max()) < 512
        (torch.int64, True)
    """
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}: choose one of {', '.join(DATASETS)}")
    if dataset == "embedded":
        if path is not None:
            raise ValueError("the embedded corpus takes no path: a local copy goes with the wikitext dataset")
        _check_limit(limit_chars)
        text = embedded_corpus()[:limit_chars]
    else:
        text = wikitext_corpus("train", path, limit_chars)
    tokenizer = train_tokenizer(text, vocab_size)
    lines = text.splitlines(keepends=True)
    pieces = []
    for start in range(0, len(lines), 4096):
        encodings = tokenizer.encode_batch_fast(lines[start : start + 4096])
        pieces.append(torch.tensor([i for encoding in encodings for i in encoding.ids], dtype=torch.int64))
    return torch.cat(pieces)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed windows of one length L: tokens [B*L], targets [B*L] (the next ones), cu_seqlens [B+1] int32.

    Example:
        >>> batch = next(packed_batches(torch.arange(100), seq_len=4, batch_size=2, steps=1))
        >>> batch.to("meta").tokens.shape, batch.max_seqlen
        (torch.Size([8]), 4)
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        tokens, targets, cu_seqlens = (x.to(device) for x in (self.tokens, self.targets, self.cu_seqlens))
        return Batch(tokens, targets, cu_seqlens, self.max_seqlen)


def packed_batches(stream: Tensor, seq_len: int, batch_size: int, steps: int, seed: int = 0) -> Iterator[Batch]:
    """`steps` batches of `batch_size` windows of `seq_len` tokens, cut from `stream` [N] at random places.

    The places depend on `seed` alone and leave every global random state untouched. Raises ValueError at the
    call for sizes below 1, a stream that is not one row of int64 ids, and a corpus with fewer than seq_len +
    1 tokens.

    Example:
        >>> batch = next(packed_batches(torch.arange(100), seq_len=4, batch_size=2, steps=1))
        >>> batch.cu_seqlens.tolist(), torch.equal(batch.targets, batch.tokens + 1)
        ([0, 4, 8], True)
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if stream.ndim != 1 or stream.dtype != torch.int64:
        raise ValueError(f"stream must be int64 of shape [N], got {stream.dtype} {list(stream.shape)}")
    if len(stream) <= seq_len:
        raise ValueError(
            f"the corpus is too short: it has {len(stream)} tokens and a window needs {seq_len + 1}; "
            "use shorter sequences, a smaller vocabulary or a larger corpus"
        )
    return _windows(stream, seq_len, batch_size, steps, torch.Generator().manual_seed(seed))


def _windows(stream: Tensor, seq_len: int, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[Batch]:
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32) * seq_len
    for _ in range(steps):
        starts = torch.randint(len(stream) - seq_len, (batch_size, 1), generator=generator)
        windows = stream[starts + torch.arange(seq_len + 1)]
        yield Batch(windows[:, :-1].flatten(), windows[:, 1:].flatten(), cu_seqlens, seq_len)
