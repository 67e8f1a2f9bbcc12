"""BERT, the bidirectional encoder, and its masked-language-model head: Devlin et al. 2018, arXiv:1810.04805.

Post-norm blocks with biases, GELU (the exact one), learned positions and token types, dropout after the embeddings,
on the attention weights and at the end of each branch. Sequences are padded to one length; `attention_mask` says
where. The arguments are called as in the transformers library, whose data collators therefore fit. There is no
pooler: the masked-language-model loss does not read it.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.models.transformer import require_positive

from .checks import IGNORE_INDEX, require_ids

__all__ = ["Bert", "BertBlock", "BertConfig", "BertForMaskedLM", "bert_base", "bert_large"]

INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT; the defaults are those of BERT-base, uncased.

    Raises ValueError for a size that is not a positive integer, for a dim that heads does not divide, and for a
    dropout outside [0, 1).

    Example:
        >>> BertConfig(dim=64, ff_dim=256, layers=2, heads=4).head_dim
        16
    """

    dim: int = 768
    ff_dim: int = 3072
    layers: int = 12
    heads: int = 12
    vocab_size: int = 30522
    positions: int = 512
    token_types: int = 2
    eps: float = 1e-12
    dropout: float = 0.1

    def __post_init__(self) -> None:
        require_positive(self, "dim", "ff_dim", "layers", "heads", "vocab_size", "positions", "token_types")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps must be positive and finite, got {self.eps!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout!r}")

    @property
    def head_dim(self) -> int:
        """Size of one attention head, dim / heads."""
        return self.dim // self.heads


class BertBlock(nn.Module):
    """One post-norm layer, x [batch, length, dim] -> the same: x = norm(x + attention(x)), then x = norm(x + mlp(x)).

    `mask` [batch, 1, 1, length] bool is False where nothing may be attended to. With dropout on, the attention
    weights are materialised wherever no fused kernel knows dropout, as on the CPU.

    Example:
        >>> block = BertBlock(BertConfig(dim=16, ff_dim=32, layers=1, heads=2))
        >>> block(torch.randn(2, 4, 16)).shape
        torch.Size([2, 4, 16])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.query: nn.Linear = nn.Linear(config.dim, config.dim)
        self.key: nn.Linear = nn.Linear(config.dim, config.dim)
        self.value: nn.Linear = nn.Linear(config.dim, config.dim)
        self.out: nn.Linear = nn.Linear(config.dim, config.dim)
        self.attention_norm: nn.LayerNorm = nn.LayerNorm(config.dim, config.eps)
        self.up: nn.Linear = nn.Linear(config.dim, config.ff_dim)
        self.down: nn.Linear = nn.Linear(config.ff_dim, config.dim)
        self.mlp_norm: nn.LayerNorm = nn.LayerNorm(config.dim, config.eps)
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self._attend(x, mask)))
        return self.mlp_norm(x + self.dropout(self.down(F.gelu(self.up(x)))))

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = (self.config.heads, self.config.head_dim)
        q, k, v = (layer(x).unflatten(-1, heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Bert(nn.Module):
    """The encoder: input_ids [batch, length] int64 -> hidden states [batch, length, dim].

    `attention_mask` [batch, length], integer or bool, is 1 for a token and 0 for padding; `token_type_ids`
    [batch, length] int64 are the segments, all 0 by default. The layers are `blocks`, where
    `ackpt.apply_activation_checkpointing` finds them. Raises ValueError for shapes and dtypes that do not fit, for a
    length over `positions`, and for ids and masks out of range (checked on CPU).

    Source: Devlin et al. 2018, arXiv:1810.04805, without the pooler.

    Example:
        >>> model = Bert(BertConfig(dim=16, ff_dim=32, layers=2, heads=2, vocab_size=10))
        >>> model(torch.tensor([[1, 2, 3], [4, 5, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])).shape
        torch.Size([2, 3, 16])
    """

    def __init__(self, config: BertConfig = BertConfig()) -> None:  # noqa: B008
        super().__init__()
        self.config = config
        self.tokens: nn.Embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions: nn.Embedding = nn.Embedding(config.positions, config.dim)
        self.token_types: nn.Embedding = nn.Embedding(config.token_types, config.dim)
        self.norm: nn.LayerNorm = nn.LayerNorm(config.dim, config.eps)
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)
        self.blocks: nn.ModuleList = nn.ModuleList(BertBlock(config) for _ in range(config.layers))
        _initialise(self)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        self._check(input_ids, attention_mask, token_type_ids)
        types = self.token_types.weight[0] if token_type_ids is None else self.token_types(token_type_ids)
        x = self.tokens(input_ids) + types + self.positions.weight[: input_ids.shape[1]]
        x = self.dropout(self.norm(x))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return x

    def _check(self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> None:
        shape, config = input_ids.shape, self.config
        if len(shape) != 2 or not input_ids.numel():
            raise ValueError(f"input_ids must be int64 of shape [batch, length], got {input_ids.dtype} {list(shape)}")
        if shape[1] > config.positions:
            raise ValueError(f"input_ids are {shape[1]} tokens long, but positions is {config.positions}: cut them")
        require_ids("input_ids", input_ids, shape, config.vocab_size, f"vocab_size is {config.vocab_size}")
        if token_type_ids is not None:
            why = f"token_types is {config.token_types}"
            require_ids("token_type_ids", token_type_ids, shape, config.token_types, why)
        if attention_mask is not None:
            # an additive mask of floats would be read the wrong way round
            if attention_mask.is_floating_point() or attention_mask.is_complex() or attention_mask.shape != shape:
                raise ValueError(
                    f"attention_mask must be integers or bools of the shape of input_ids, {list(shape)}, 1 for a token "
                    f"and 0 for padding; got {attention_mask.dtype} {list(attention_mask.shape)}"
                )
            require_ids("attention_mask", attention_mask.long(), shape, 2, "1 is for a token, 0 for padding")


class BertForMaskedLM(nn.Module):
    """BERT that predicts masked tokens: input_ids [batch, length] int64 -> logits [batch, length, vocab_size].

    With `labels` [batch, length] int64 (-100: not asked for) the result is the mean cross-entropy in nats over the
    positions that are asked for, a scalar (nan if none is, as `F.cross_entropy` has it). The decoder's weight is the
    token embedding itself; its bias is `bias`. Takes and raises what `Bert` does, and ValueError for labels of
    another shape or outside the vocabulary.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1, task 1.

    Example:
        >>> model = BertForMaskedLM(BertConfig(dim=16, ff_dim=32, layers=2, heads=2, vocab_size=10))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 10])
        >>> model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[-100, 7, -100]])).shape
        torch.Size([])
    """

    def __init__(self, config: BertConfig = BertConfig()) -> None:  # noqa: B008
        super().__init__()
        self.config = config
        self.bert: Bert = Bert(config)
        self.transform: nn.Linear = nn.Linear(config.dim, config.dim)
        self.norm: nn.LayerNorm = nn.LayerNorm(config.dim, config.eps)
        self.bias: nn.Parameter = nn.Parameter(torch.zeros(config.vocab_size))
        _initialise(self.transform)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if labels is not None:
            words = self.config.vocab_size
            require_ids("labels", labels, input_ids.shape, words, f"vocab_size is {words}", IGNORE_INDEX)
        x = self.bert(input_ids, attention_mask, token_type_ids)
        x = self.norm(F.gelu(self.transform(x)))
        logits = F.linear(x, self.bert.tokens.weight, self.bias)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _initialise(model: nn.Module) -> None:
    """Normal weights of std 0.02, zero biases; norms keep 1 and 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def bert_base(dropout: float = 0.1) -> BertForMaskedLM:
    """BERT-base with its masked-language-model head: 109 514 298 parameters.

    Example:
        >>> with torch.device("meta"):
        ...     sum(parameter.numel() for parameter in bert_base().parameters())
        109514298
    """
    return BertForMaskedLM(BertConfig(dropout=dropout))


def bert_large(dropout: float = 0.1) -> BertForMaskedLM:
    """BERT-large with its masked-language-model head: 335 174 458 parameters.

    Example:
        >>> with torch.device("meta"):
        ...     sum(parameter.numel() for parameter in bert_large().parameters())
        335174458
    """
    return BertForMaskedLM(BertConfig(dim=1024, ff_dim=4096, layers=24, heads=16, dropout=dropout))
