"""Attention of linear layers that computes what torch's computes, so that every sample has its gradient."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from opacus_bc._opacus import DPMultiheadAttention


class PrivateMultiheadAttention(DPMultiheadAttention):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's ``DPMultiheadAttention``, with the outputs of ``nn.MultiheadAttention``.

    Opacus's own (1.6) puts heads and positions together in the wrong order with ``batch_first=True``, so that
    pretrained weights compute something else there. It also refuses masks that torch's Transformer layers
    pass. Parameters and ``state_dict`` are Opacus's.

    **Formal guarantee**: a sample's output is a function of that sample's query, key, value and masks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See ``nn.MultiheadAttention``."""
        super().__init__(*args, **kwargs)
        if self.add_bias_kv:  # they see the layout that the layer is given
            self.seq_bias_k.batch_first = self.seq_bias_v.batch_first = self.batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and results of ``nn.MultiheadAttention``, for inputs with a batch dimension."""
        if query.dim() != 3:
            raise ValueError(f"query of shape {tuple(query.shape)}: it needs a batch dimension")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a remark on attn_mask, as in torch: pass attn_mask too")
        k, v = self.klinear(key), self.vlinear(value)
        if self.add_bias_kv:
            k, v = self.seq_bias_k(k), self.seq_bias_v(v)
        q, k, v = map(self._heads, (self.qlinear(query), k, v))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if attn_mask is not None:
            scores = _masked(scores, attn_mask.reshape(-1, *_heads_of(attn_mask, self.num_heads)))
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask[:, None, None])
        weights = self.dropout(scores.softmax(-1))
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        output = self.out_proj(mixed if self.batch_first else mixed.transpose(0, 1))
        if not need_weights:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights

    def _heads(self, x: Tensor) -> Tensor:
        """Samples, heads, positions and what a head reads of them, in this order."""
        first = x if self.batch_first else x.transpose(0, 1)
        return first.reshape(*first.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


def _heads_of(mask: Tensor, heads: int) -> tuple[int, ...]:
    """The shape of one sample's mask: one for all heads, or one for each."""
    return (1 if mask.dim() == 2 else heads, *mask.shape[-2:])


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores with a mask of torch's on them: True, or what is added; keys that were appended have none."""
    mask = F.pad(mask, (0, scores.shape[-1] - mask.shape[-1]))
    return scores.masked_fill(mask, -math.inf) if not mask.is_floating_point() else scores + mask
