"""The model in eager torch: the default where no GPU is, and the oracle for the other engines."""

from pathlib import Path

import torch

from trtllm_hisparse.engine.attention import LatentAttention
from trtllm_hisparse.engine.base import KVStep, StepBatch
from trtllm_hisparse.engine.index_cpu import index_top_k
from trtllm_hisparse.engine.indexer import Indexer
from trtllm_hisparse.engine.moe import MLP, MixtureOfExperts
from trtllm_hisparse.engine.ops import linear, pad_rows, rms_norm
from trtllm_hisparse.engine.rope import RotaryEmbedding
from trtllm_hisparse.models.checkpoint import Checkpoint, Scope
from trtllm_hisparse.models.config import ModelConfig, load_config
from trtllm_hisparse.models.spec import ModelSpec


class Layer:
    """One decoder layer's weights; `indexer` is None where the layer shares another's selection."""

    def __init__(self, config: ModelConfig, number: int, weights: Scope) -> None:
        hidden = config.hidden_size
        self.input_norm = weights.tensor("input_layernorm.weight", hidden)
        self.post_attention_norm = weights.tensor("post_attention_layernorm.weight", hidden)
        self.attention = LatentAttention(config, weights.under("self_attn."))
        full = config.indexer_types[number] == "full"
        self.indexer = Indexer(config, weights.under("self_attn.indexer.")) if full else None
        mlp = weights.under("mlp.")
        sparse = config.mlp_layer_types[number] == "sparse"
        self._mlp = MixtureOfExperts(config, mlp) if sparse else MLP.load(mlp, hidden, config.intermediate_size)

    def mlp(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """The MLP of `x [T, hidden]`, of which the first `tokens` rows are no padding."""
        return self._mlp(x, tokens) if isinstance(self._mlp, MixtureOfExperts) else self._mlp(x)


class TorchEngine:
    """GLM-5.x or DeepSeek-V3.2 behind the `Engine` seam.

    On CPU a token's logits are bitwise the same whatever else is in the batch, however its prompt was cut into
    chunks, whatever the page size and wherever its rows lie (`ops` says how). A request whose numbers stop being
    finite, index scores included, gets NaN logits; the others are untouched.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Read every weight of `config`'s layers from `checkpoint`; CheckpointError if one does not fit."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
        self.config = config
        self.spec: ModelSpec = config.spec(dtype)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self._rope = RotaryEmbedding(config)
        model = checkpoint.scope("model.", dtype)
        table = (config.vocab_size, config.hidden_size)
        self._embedding = model.tensor("embed_tokens.weight", *table)
        self._layers = [Layer(config, i, model.under(f"layers.{i}.")) for i in range(config.num_hidden_layers)]
        self._norm = model.tensor("norm.weight", config.hidden_size)
        self._head = self._embedding
        if not config.tie_word_embeddings:
            self._head = checkpoint.scope("lm_head.", dtype).tensor("weight", *table)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "TorchEngine":
        """The model in checkpoint directory `path`, on the CPU."""
        return cls(load_config(path), Checkpoint(path), dtype)

    @torch.no_grad()
    def step(self, kv: KVStep) -> torch.Tensor:
        """Run `kv.batch` and return float32 logits `[L, vocab]` of its `logit_rows`."""
        batch = kv.batch
        self._check(batch)
        queries = len(batch.token_ids)
        rotation = self._rope(pad_rows(batch.positions))
        x = self._embedding[pad_rows(batch.token_ids)]
        for i, layer in enumerate(self._layers):
            hidden = rms_norm(x, layer.input_norm, self.config.rms_norm_eps)
            query, row, q_latent = layer.attention.project(hidden, rotation)
            kv.append(i, row[:queries])
            if layer.indexer is not None:
                index = layer.indexer.project(hidden, q_latent, rotation)
                kv.append_index(i, index.key[:queries])
                pages = kv.index_pages(i)
                selections, unordered = index_top_k(
                    index.query,
                    index.weight,
                    pages.keys,
                    pages.page_table,
                    batch.cu_queries,
                    (batch.positions + 1).int(),
                    self.spec.top_k,
                )
                kv.resolve(i, selections)
                # Without an order there is no right answer: let the request's logits say so.
                x[:queries].masked_fill_(unordered[:, None], torch.nan)
            locations = kv.locations(i)
            x = x + layer.attention(query, kv.payload(i), locations)
            x = x + layer.mlp(rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps), queries)
        return self._logits(x[batch.logit_rows])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(pad_rows(x), self._norm, self.config.rms_norm_eps)
        return linear(normed, self._head)[: len(x)].float()

    def _check(self, batch: StepBatch) -> None:
        """Refuse a batch whose shapes or ids would read outside the model (ValueError)."""
        queries = len(batch.token_ids)
        if not queries or len(batch.positions) != queries or int(batch.cu_queries[-1]) != queries:
            raise ValueError(
                f"batch: expected token_ids, positions and cu_queries of one length of at least 1, got "
                f"{queries}, {len(batch.positions)} and {int(batch.cu_queries[-1])}"
            )
        for name, ids, size in (
            ("token_ids", batch.token_ids, self.config.vocab_size),
            ("positions", batch.positions, self.config.max_position_embeddings),
        ):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= size:
                raise ValueError(f"{name}: expected 0..{size - 1}, got {low}..{high}")
