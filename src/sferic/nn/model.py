"""The hybrid decoder."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sferic.config import ModelConfig
from sferic.nn.batch import Batch
from sferic.nn.block import Block
from sferic.nn.cache import Cache
from sferic.nn.cores import Vocabulary
from sferic.nn.dispatch import Routing
from sferic.nn.init import Draw, init_weights
from sferic.nn.layers import Linear, RMSNorm
from sferic.ops.precision import fp32

Routings = list[Routing | None]


class HybridModel(nn.Module):
    """Embedding, blocks, final norm and head; `embed` -> `hidden` -> `head`.

    Written as if one device existed.  The residual stream is at least float32, the branches run in
    `compute_dtype`, with weights cast on use; None takes the dtype of the weights.
    `recompute` keeps only each block's input for the backward pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # a dict, so that a part of the layers keeps their names
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.vocabulary = Vocabulary()
        self.compute_dtype: torch.dtype | None = None
        self.recompute = False

    def init_weights(self, seed: int) -> "HybridModel":
        """Draw all weights (Xavier, with the config's `init_gain`); the same on every device."""
        init_weights(self, self.config.init_gain, seed)
        V, D = self.embed_tokens.weight.shape
        draw = Draw(self, "", seed)
        draw.xavier("embed_tokens.weight", V, D)
        draw.xavier("lm_head.weight", D, V)
        return self

    def embed(self, batch: Batch) -> Tensor:
        """The pack's embeddings [T, D]."""
        if batch.embeddings is not None:
            return batch.embeddings
        assert batch.tokens is not None
        return self.vocabulary.embed(batch.tokens, self.embed_tokens.weight)

    def hidden(
        self,
        batch: Batch,
        cache: Cache | None = None,
        replay: list[Tensor | None] | None = None,
    ) -> tuple[Tensor, Routings]:
        """Run the blocks and the final norm.

        Args:
            batch: a pack of T tokens.
            cache: read and written in place, at the batch's slots and positions.
            replay: per layer, expert indices [T, k] of an earlier run to repeat.

        Returns:
            Hidden states [T, D] and each layer's routing (None where the FFN is dense).
        """
        if cache is not None and self.recompute and self.training and torch.is_grad_enabled():
            raise ValueError("recompute runs blocks twice, a cache takes a token once: use one")
        x = self.embed(batch)
        dtype = self.compute_dtype or x.dtype
        x = x.to(fp32(x.dtype))
        routings: Routings = []
        for name, block in self.layers.items():
            indices = None if replay is None else replay[int(name)]
            if self.recompute and self.training and torch.is_grad_enabled():
                x, routing = self._recomputed(block, x, batch, indices, dtype)
            else:
                x, routing = block(x, batch, cache, indices, dtype)
            routings.append(routing)
        return self.norm(x).to(dtype), routings

    @staticmethod
    def _recomputed(
        block: nn.Module, x: Tensor, batch: Batch, indices: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Routing | None]:
        """Run a block that backward computes again, with the experts of this first run."""
        chosen = indices

        def run(x: Tensor) -> tuple[Tensor, Routing | None]:
            nonlocal chosen
            y, routing = block(x, batch, None, chosen, dtype)
            if chosen is None and routing is not None:
                chosen = routing.indices
            return y, routing

        return checkpoint(run, x, use_reentrant=False)  # type: ignore[return-value]

    def head(self, h: Tensor) -> Tensor:
        """Logits [T, vocab] of hidden states [T, D]."""
        return self.vocabulary.logits(h, self.lm_head.weight)

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        """Summed cross entropy of labels [T] (-100: none); divide by the global label count."""
        return self.vocabulary.loss(h, self.lm_head.weight, labels)

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | list[int] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits of whole sequences, for small use.

        Args:
            tokens: [B, T], or a pack [T] with cu_seqlens.
            lengths: [B], true lengths of right-padded rows; logits of pads are 0.
            cu_seqlens: [S + 1], document boundaries of a pack.

        Returns:
            [B, T, vocab], or [T, vocab] for a pack.
        """
        if cu_seqlens is not None:
            if tokens.dim() != 1 or lengths is not None:
                raise ValueError(
                    f"with cu_seqlens, tokens must be one pack [T] without lengths, "
                    f"got {list(tokens.shape)}"
                )
            return self.head(self.hidden(Batch.from_cu_seqlens(tokens, cu_seqlens))[0])
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [B, T], or [T] with cu_seqlens: {list(tokens.shape)}")
        B, T = tokens.shape
        counts = [T] * B if lengths is None else [int(n) for n in lengths]
        if len(counts) != B or any(not 0 <= n <= T for n in counts):
            raise ValueError(f"lengths {counts} must be {B} numbers between 0 and {T}")
        rows = [tokens[b, :n] for b, n in enumerate(counts)]
        logits = self.head(self.hidden(Batch.pack(rows))[0])
        if lengths is None:
            return logits.view(B, T, -1)
        padded = logits.new_zeros(B, T, logits.shape[-1])
        for row, part in zip(padded, logits.split(counts), strict=True):
            row[: len(part)] = part
        return padded
