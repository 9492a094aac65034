"""The real engine over the hierarchy: the same bits under every placement, load and chunking (I8)."""

from dataclasses import replace

import pytest
import torch

from trtllm_hisparse.config import HiSparseConfig, Placement
from trtllm_hisparse.engine.torch_engine import TorchEngine
from trtllm_hisparse.models.synthetic import write_checkpoint
from trtllm_hisparse.runtime.loop import Runtime
from trtllm_hisparse.runtime.request import FinishReason, ImportedHistory, Request, SamplingParams

TOP_K = 16
CONFIG = HiSparseConfig(
    device_pool_bytes=2 << 20,
    host_pool_bytes=32 << 20,
    hot_rows=64,
    page_rows=16,
    max_requests=4,
    max_context=1600,
    prefill_chunk=64,
    max_batch_tokens=96,
)
ROOMY = replace(CONFIG, placement=Placement.RESIDENT, device_pool_bytes=128 << 20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=5, layers=7, hidden=64, top_k=TOP_K)
    return TorchEngine.load(path)


def prompt(seed, length):
    """A prompt that repeats itself, so that old rows are selected again."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (max(length // 3, 1),), generator=generator)
    return tuple(words.repeat(4)[:length].tolist())


REQUESTS = [
    Request(prompt(n, length), max_tokens, SamplingParams(temperature=0.7 * (n % 2), top_p=0.9, seed=n))
    for n, (length, max_tokens) in enumerate(
        [(1, 40), (15, 3), (16, 17), (17, 30), (31, 5), (300, 40), (511, 20), (512, 33), (513, 1), (1500, 48)]
    )
]


def serve(engine, config, requests, stagger=3, check=False):
    """Run requests that arrive a few steps apart; their tokens, and the runtime's stats."""
    runtime = Runtime(engine, config)
    tokens = [[] for _ in requests]
    for n, request in enumerate(requests):
        runtime.submit(request, lambda event, n=n: tokens[n].extend(event.tokens))
        for _ in range(stagger):
            runtime.step()
    runtime.run_until_idle()
    if check:
        runtime.check()
    stats = runtime.stats()
    runtime.close()
    return tokens, stats


@pytest.fixture(scope="module")
def alone(engine):
    """Each request by itself, everything resident."""
    return [serve(engine, ROOMY, [request])[0][0] for request in REQUESTS]


@pytest.mark.parametrize(
    ("placement", "count", "changes"),
    [
        ("resident", 10, {"device_pool_bytes": 16 << 20}),
        ("fixed", 10, {}),
        ("adaptive", 10, {}),
        ("adaptive", 10, {"admission_reserve_pages": 9, "population_pages": 1, "page_rows": 8}),
        ("fixed", 7, {"hot_rows": TOP_K, "prefill_chunk": 7, "page_rows": 64}),
    ],
)
def test_the_same_tokens_under_every_placement_at_any_load(engine, alone, placement, count, changes):
    config = replace(CONFIG, placement=Placement(placement), **changes)
    tokens, stats = serve(engine, config, REQUESTS[:count], check=True)
    assert tokens == alone[:count]
    assert len({token for output in tokens for token in output}) > 40, "the outputs say something"
    if placement != "resident":
        assert stats.host_rows > 500
        assert stats.hot_rows > 500


def test_memory_churns_while_tokens_stay_the_same(engine):
    """Waits, reclaims and population all happen, and change nothing."""
    requests = [Request(prompt(n, 300 + 7 * n), 100, SamplingParams(seed=n, temperature=1.0)) for n in range(6)]
    config = replace(CONFIG, device_pool_bytes=1100 << 10, max_context=500)
    tokens, stats = serve(engine, config, requests, stagger=40, check=True)
    assert (stats.admissions, stats.waits > 0, stats.reclaims > 0) == (6, True, True)
    assert stats.populated_pages > 0
    assert tokens == serve(engine, ROOMY, requests)[0]


class Recorder:
    """Stands for the prefill side: the rows and keys an engine produced for one request."""

    def __init__(self, engine):
        self._engine = engine
        self.spec, self.dtype, self.vocab_size = engine.spec, engine.dtype, engine.vocab_size
        self.rows, self.keys = {}, {}

    def step(self, kv):
        append, append_index = kv.append, kv.append_index

        def record(target, write):
            def recorded(layer, values):
                target.setdefault(layer, []).append(values.clone())
                write(layer, values)

            return recorded

        kv.append, kv.append_index = record(self.rows, append), record(self.keys, append_index)
        return self._engine.step(kv)

    def history(self, length):
        rows, keys = (
            {layer: torch.cat(parts)[:length] for layer, parts in given.items()}
            for given in (self.rows, self.keys)
        )
        return ImportedHistory(length, rows, keys)


@pytest.mark.parametrize("placement", list(Placement))
def test_the_decode_side_of_a_split_continues_bit_for_bit(engine, alone, placement):
    """import_history: rows computed by another engine, ending before, on and after a page boundary."""
    n = 6
    recorder = Recorder(engine)
    serve(recorder, ROOMY, [replace(REQUESTS[n], max_tokens=1)])
    for length in (1, 63, 64, 65, 495, 496, 497, 510):
        request = replace(REQUESTS[n], history=recorder.history(length))
        config = replace(CONFIG, placement=placement, device_pool_bytes=8 << 20)
        tokens, stats = serve(engine, config, [request], check=True)
        assert tokens == [alone[n]], length
        assert stats.prompt_tokens == 511 - length


def test_bfloat16_rows_are_as_exact(tmp_path):
    path = write_checkpoint(tmp_path, seed=5, layers=7, hidden=64, top_k=TOP_K, dtype=torch.bfloat16)
    engine = TorchEngine.load(path, torch.bfloat16)
    requests = REQUESTS[3:8]
    config = replace(CONFIG, device_pool_bytes=1 << 20, max_context=600)
    tokens, stats = serve(engine, config, requests, check=True)
    assert tokens == [serve(engine, ROOMY, [request])[0][0] for request in requests]
    assert stats.host_rows > 100


def test_stop_ids_cut_the_same_output(engine, alone):
    """The stop token is not part of the output; the tokens before it are the same."""
    n = 5
    stop = alone[n][10]
    first = alone[n].index(stop)
    events = []
    runtime = Runtime(engine, CONFIG)
    runtime.submit(replace(REQUESTS[n], stop_ids=frozenset({stop})), events.append)
    runtime.run_until_idle()
    runtime.close()
    assert [t for event in events for t in event.tokens] == alone[n][:first]
    assert events[-1].reason is FinishReason.STOP
