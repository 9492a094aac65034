"""GLM-5 family (glm_moe_dsa) at its real sizes: every layer owns its rows, several share one selection."""

from collections.abc import Iterable

from trtllm_hisparse.models.spec import LayerSpec, ModelSpec

LAYERS = 78
INDEXED = (0, 1, 2, *range(6, LAYERS, 4))
"""The 21 producers of GLM-5.2 and 5.3: the first three layers, then one in four."""

_ROWS = (
    "Assumed: a row is 512 latent + 64 rotary elements at one FP8 byte each (576 B), an index key 128 FP8 "
    "bytes and a float32 scale (132 B); the MTP layer keeps no history here."
)


def _dsa(name: str, producers: Iterable[int], max_context: int, source: str) -> ModelSpec:
    """A full layer selects; shared layers behind it attend over the same positions, in rows of their own."""
    selects = set(producers)
    layers: list[LayerSpec] = []
    producer = 0
    for i in range(LAYERS):
        producer = i if i in selects else producer
        layers.append(LayerSpec(index=producer, payload=i))
    return ModelSpec(
        name=name,
        layers=tuple(layers),
        top_k=2048,
        row_bytes=576,
        index_row_bytes=132,
        max_context=max_context,
        source=f"{source} {_ROWS}",
    )


GLM_5 = _dsa("glm-5", range(LAYERS), 202_752, "Released config: 78 layers without indexer_types, so all select.")
GLM_5_2 = _dsa("glm-5.2", INDEXED, 1 << 20, "Released config: indexer_types, index_topk_freq 4, offset 3.")
GLM_5_3 = _dsa("glm-5.3", INDEXED, 1 << 20, "Released config, the same architecture as GLM-5.2.")
