"""DeepSeek sparse-attention models at their real sizes."""

from trtllm_hisparse.models.spec import LayerSpec, ModelSpec

DEEPSEEK_V3_2 = ModelSpec(
    name="deepseek-v3.2",
    layers=tuple(LayerSpec(index=i, payload=i) for i in range(61)),
    top_k=2048,
    row_bytes=656,
    index_row_bytes=132,
    max_context=163_840,
    source=(
        "Released config: 61 layers, each with an indexer and rows of its own. Row: the fp8_ds_mla layout, "
        "512 FP8 latent + 4 float32 scales + 64 BF16 rotary elements. Assumed: an index key is 128 FP8 bytes "
        "and a float32 scale."
    ),
)

V4_1_SOURCES = {2: 2, 8: 2, 14: 2, 20: 1}
"""{Full layer of V4.1-Flash: m}: it stores rows and index keys and selects."""
V4_1_REINDEX = (24, 28, 32, 36)
"""Layers of V4.1-Flash that select anew over the rows and index keys of layer 20."""


def _v4_1_layers(count: int) -> tuple[LayerSpec, ...]:
    """Window-only layers up to the first source; a layer neither Full nor Reindex reuses what precedes it."""
    layers: list[LayerSpec] = []
    current = LayerSpec(index=None, payload=None)
    for i in range(count):
        if i in V4_1_SOURCES:
            layers.append(LayerSpec(index=i, payload=i))
        elif i in V4_1_REINDEX:
            layers.append(LayerSpec(index=i, payload=current.payload, index_keys=current.payload))
        else:
            layers.append(LayerSpec(index=current.index, payload=current.payload))
        current = layers[-1]
    return tuple(layers)


DEEPSEEK_V4_1_FLASH = ModelSpec(
    name="deepseek-v4.1-flash",
    layers=_v4_1_layers(40),
    top_k=512,
    row_bytes=288,
    index_row_bytes=68,
    tokens_per_row=V4_1_SOURCES,
    max_context=1 << 20,
    source=(
        "Released config: kv_source_layer_ids 2, 8, 14, 20; index_source_layer_ids those and 24, 28, 32, 36; "
        "compress_ratios 2 up to layer 19, then 1. Row: 512 FP4 + 32 E4M3 scales; index key: 128 FP4 + "
        "4 UE8M0 scales; together the published 890 B per token. Assumed: 1 Mi positions. The 128-token "
        "window of every layer is engine state, not history."
    ),
)
