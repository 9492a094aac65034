"""Equations 8, 11, 12, 13 and the per-session table, to the digits that were published."""

import pytest

from trtllm_hisparse import capacity
from trtllm_hisparse.config import GIB
from trtllm_hisparse.errors import ConfigError
from trtllm_hisparse.models import registry
from trtllm_hisparse.models.spec import LayerSpec, ModelSpec

GLM = registry.get("glm-5.3")
V4_1 = registry.get("deepseek-v4.1-flash")
SETTING = {
    "context": 100_000,
    "hot_rows": 4096,
    "page_rows": 64,
    "slots": 35,
    "max_width": 8,
    "drafter_window": 2048,
    "drafter_row_bytes": 12_288,
}


def plan(spec=GLM, **changes):
    return capacity.plan(spec, **(SETTING | changes))


def gib(size, digits):
    return round(size / GIB, digits)


def test_glm_per_session():
    p = plan()
    assert p.resident == 100_032 * (78 * 576 + 21 * 132)
    assert p.adaptive == 100_032 * 21 * 132 + (4096 + 64) * 78 * 576
    assert gib(p.resident, 3) == 4.444
    assert gib(p.adaptive, 3) == 0.432
    assert round(p.resident / p.adaptive, 1) == 10.3


def test_glm_per_session_with_a_drafter():
    p = plan()
    assert gib(p.adaptive_speculative, 3) == 0.492
    assert gib(p.resident_speculative, 3) == 4.469
    assert gib((p.ring + p.staging) / 35, 3) == 0.060
    assert p.resident_speculative - p.resident == 2176 * 12_288
    assert p.adaptive_speculative - p.adaptive == 2176 * 12_288 + 4 * 8 * 2048 * 576


def test_glm_ring_and_staging():
    p = plan()
    assert p.ring_rows == 2176
    assert p.ring == 35 * 2176 * 12_288
    assert gib(p.ring, 2) == 0.87
    assert gib(p.staging, 2) == 1.23
    assert gib(p.staging_dedicated, 1) == 24.0
    assert p.staging_dedicated / p.staging == 19.5


def test_ring_share_does_not_depend_on_context():
    for context in (32_768, 100_000):
        p = plan(context=context)
        assert gib(p.resident_speculative - p.resident, 3) == 0.025


def test_glm_host():
    p = plan(host_bytes=4_300_000_000_000)
    assert round(208 * p.host / 1e12, 2) == 0.93
    assert p.host_sessions == 956


def test_sessions_per_gpu():
    p = plan(device_bytes=30 * GIB)
    assert p.sessions(p.resident) == 6
    assert p.sessions(p.adaptive) == 69
    assert p.sessions(p.adaptive_speculative) == 60
    assert plan().sessions(p.resident) is None
    assert plan().host_sessions is None


@pytest.mark.parametrize("width", [4, 6, 8])
def test_one_ring_covers_the_narrower_blocks(width):
    assert capacity.ring_rows(2048, width, 64) == 2176


@pytest.mark.parametrize(("window", "width", "page"), [(1, 1, 1), (128, 5, 64), (100, 7, 16), (2048, 8, 64)])
def test_live_draft_positions_never_share_a_ring_row(window, width, page):
    rows = capacity.ring_rows(window, width, page)
    assert rows % page == 0
    for first in (0, page - 1, 5 * rows - 1):
        # The visible window and the block, from the start of the page they begin in.
        live = range(first - first % page, first + window + width)
        used = {capacity.ring_address(slot, t, rows) for slot in (0, 3) for t in live}
        assert len(used) == 2 * len(live)
        assert all(t // rows in (0, 3) for t in used)


def test_staging_bound_of_one_request_and_source():
    assert capacity.staging_rows(8, 2048) == 16_384


def test_staging_takes_the_largest_group():
    """Groups of 10 + 20 and of 7 bytes per row."""
    layers = (LayerSpec(0, 0), LayerSpec(0, 1), LayerSpec(2, 2))
    spec = ModelSpec("mixed", layers, 4, row_bytes={0: 10, 1: 20, 2: 7}, index_row_bytes=1)
    assert capacity.staging_bytes(spec, slots=3, max_width=2) == 3 * 2 * 4 * 30
    assert capacity.staging_bytes_dedicated(spec, slots=3, max_width=2) == 3 * 2 * 4 * 37


def test_speculation_pays_until_slots_run_out():
    assert round(140 / 208, 2) == 0.67
    assert capacity.speculation_pays(140, 208, load=128, tpot_ratio=0.77)
    assert not capacity.speculation_pays(140, 208, load=256, tpot_ratio=0.71)
    assert not capacity.speculation_pays(100, 100, load=10, tpot_ratio=1.0)


def test_packed_rows():
    """V4.1: three stores pack two positions, so their pages fill half as fast."""
    p = plan(V4_1)
    packed, plain = 50_048, 100_032
    assert p.host == 288 * (3 * packed + plain)
    assert p.resident == (288 + 68) * (3 * packed + plain)
    assert p.adaptive == 68 * (3 * packed + plain) + 288 * 4 * (4096 + 64)
    assert p.staging == 35 * 8 * 512 * 288
    assert p.staging_dedicated == 4 * p.staging


def test_v3_2():
    p = plan(registry.get("deepseek-v3.2"))
    assert p.resident == 100_032 * 61 * (656 + 132)
    assert p.adaptive == 61 * (100_032 * 132 + 4160 * 656)


def test_a_short_context_reserves_no_more_than_itself():
    assert plan(context=4160).adaptive == plan(context=4160).resident
    assert plan(context=4161).adaptive < plan(context=4161).resident


def test_partial_pages_are_reserved_whole():
    assert plan(context=1).resident == 64 * (78 * 576 + 21 * 132)
    assert plan(hot_rows=4097).adaptive == plan(hot_rows=4160).adaptive


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, r"context: expected 1 to 1048576 \(glm-5.3\), got 0"),
        ({"context": 1_048_577}, "context: expected 1 to 1048576"),
        ({"hot_rows": 2047}, r"hot_rows: expected at least top_k = 2048 \(glm-5.3\), got 2047"),
        ({"page_rows": 0}, "page_rows: expected at least 1, got 0"),
        ({"slots": 0}, "slots: expected at least 1, got 0"),
        ({"max_width": -1}, "max_width: expected at least 1, got -1"),
        ({"drafter_window": 0}, "drafter_window: expected at least 1"),
        ({"drafter_row_bytes": 0}, "drafter_row_bytes: expected at least 1"),
        ({"device_bytes": 0}, "device_bytes: expected at least 1, got 0"),
        ({"host_bytes": -5}, "host_bytes: expected at least 1, got -5"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 208, 128, 0.7), "sessions_spec: expected at least 1, got 0"),
        ((140, 0, 128, 0.7), "sessions_plain: expected at least 1, got 0"),
        ((140, 208, 0, 0.7), "load: expected at least 1, got 0"),
        ((140, 208, 128, float("nan")), "tpot_ratio: expected a number above 0, got nan"),
    ],
)
def test_bad_comparisons_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        capacity.speculation_pays(*arguments)
