"""The real models as data: roles per layer, and what the hierarchy derives from them."""

import pytest

from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.models import registry
from trtllm_hisparse.models.spec import CacheState, LayerSpec, ModelSpec

GLM = registry.get("glm-5.3")
V4_1 = registry.get("deepseek-v4.1-flash")


@pytest.mark.parametrize(
    ("name", "layers", "producers", "owners", "index_stores", "calls", "copies", "chi"),
    [
        ("glm-5", 78, 78, 78, 78, 78, 0, 1),
        ("glm-5.2", 78, 21, 78, 21, 21, 57, 4),
        ("glm-5.3", 78, 21, 78, 21, 21, 57, 4),
        ("deepseek-v3.2", 61, 61, 61, 61, 61, 0, 1),
        ("deepseek-v4.1-flash", 40, 8, 4, 4, 8, 0, 1),
    ],
)
def test_derived_counts(name, layers, producers, owners, index_stores, calls, copies, chi):
    spec = registry.get(name)
    assert spec.name == name
    assert len(spec.layers) == layers
    assert len(spec.producers) == producers
    assert len(spec.payload_owners) == owners
    assert len(spec.index_stores) == index_stores
    assert (spec.resolver_calls, spec.follower_copies, spec.chi) == (calls, copies, chi)


@pytest.mark.parametrize(
    ("name", "payload", "index", "top_k"),
    [
        ("glm-5.3", 78 * 576, 21 * 132, 2048),
        ("glm-5", 78 * 576, 78 * 132, 2048),
        ("deepseek-v3.2", 61 * 656, 61 * 132, 2048),
        ("deepseek-v4.1-flash", 2.5 * 288, 2.5 * 68, 512),
    ],
)
def test_bytes_per_token(name, payload, index, top_k):
    spec = registry.get(name)
    assert spec.row_bytes_per_token == payload
    assert spec.index_bytes_per_token == index
    assert spec.top_k == top_k


def test_v4_1_flash_has_the_published_bytes_per_token():
    assert V4_1.row_bytes_per_token + V4_1.index_bytes_per_token == 890


def test_every_spec_states_its_source():
    assert all(spec.source for spec in registry.MODELS.values())


def test_glm_members():
    """The first three layers: 0 and 1 alone, then groups of four up to layer 77."""
    groups = [(0,), (1,), *(tuple(range(i, i + 4)) for i in range(2, 78, 4))]
    assert GLM.cache_states == tuple(CacheState(group[0], group) for group in groups)
    assert GLM.resolutions == tuple((group[0], n) for n, group in enumerate(groups))
    assert GLM.followers == tuple(i for group in groups for i in group[1:])


def test_glm_shared_layers_read_rows_of_their_own():
    assert GLM.layers[6] == LayerSpec(index=6, payload=6)
    assert GLM.layers[9] == LayerSpec(index=6, payload=9)
    assert GLM.layers[77] == LayerSpec(index=74, payload=77)


def test_v4_1_roles():
    window, full, reindex = LayerSpec(None, None), (2, 8, 14, 20), (24, 28, 32, 36)
    assert V4_1.layers[:2] == (window, window)
    for i in range(2, 40):
        source = max(s for s in full if s <= i)
        selects = max(s for s in full + reindex if s <= i)
        keys = 20 if i in reindex else None
        assert V4_1.layers[i] == LayerSpec(selects, source, keys), i


def test_v4_1_sources_share_one_cache_state_across_reindex_layers():
    assert V4_1.cache_states == tuple(CacheState(i, (i,)) for i in (2, 8, 14, 20))
    assert V4_1.resolutions == ((2, 0), (8, 1), (14, 2), (20, 3), (24, 3), (28, 3), (32, 3), (36, 3))
    assert V4_1.producers == (2, 8, 14, 20, 24, 28, 32, 36)
    assert V4_1.index_stores == (2, 8, 14, 20)
    assert [V4_1.tokens_per_row_of(i) for i in V4_1.payload_owners] == [2, 2, 2, 1]


def test_v3_2_layers_are_independent():
    spec = registry.get("deepseek-v3.2")
    assert spec.cache_states == tuple(CacheState(i, (i,)) for i in range(61))


def test_unknown_model_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"expected one of glm-5, .*deepseek-v4.1-flash, got 'glm-9'"):
        registry.get("glm-9")


OWN = LayerSpec(0, 0)


@pytest.mark.parametrize(
    ("layers", "top_k", "message"),
    [
        ((OWN,), 0, "top_k must be at least 1, got 0"),
        ((LayerSpec(0, None),), 1, "layer 0 needs both index and payload"),
        ((LayerSpec(None, 0),), 1, "layer 0 needs both index and payload"),
        ((OWN, LayerSpec(2, 1), OWN), 1, r"layer 1 index=2 must name a layer in 0\.\.1"),
        ((OWN, LayerSpec(1, 2), OWN), 1, r"layer 1 payload=2 must name a layer in 0\.\.1"),
        ((OWN, LayerSpec(-1, 1)), 1, "layer 1 index=-1 must name"),
        ((OWN, LayerSpec(0, 1), LayerSpec(1, 2)), 1, "layer 2 shares the index of 1, which makes none"),
        ((OWN, LayerSpec(0, 0), LayerSpec(0, 1)), 1, "layer 2 reads the payload of 1, which owns none"),
        ((OWN, LayerSpec(0, 1), LayerSpec(2, 2, 1)), 1, "layer 2 scores keys of 1, which stores none"),
    ],
)
def test_bad_specs_are_refused(layers, top_k, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec("bad", layers, top_k, row_bytes=1, index_row_bytes=1)
