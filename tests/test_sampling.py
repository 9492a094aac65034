"""The draw, to the token: ties, boundaries, seeds, and the law it follows."""

import math

import numpy as np
import pytest
import torch

from trtllm_hisparse.errors import RequestError
from trtllm_hisparse.runtime.request import SamplingParams
from trtllm_hisparse.runtime.sampling import sample


def logits_of(*probs):
    return torch.tensor([math.log(p) for p in probs], dtype=torch.float32)


def drawn(logits, draws=300, **params):
    """Every token drawn over many positions."""
    return {sample(logits, SamplingParams(temperature=1.0, seed=11, **params), n) for n in range(draws)}


def test_greedy_takes_the_lowest_id_among_equals():
    assert sample(torch.tensor([0.0, 3.0, 3.0, 1.0]), SamplingParams(), 5) == 1
    assert sample(torch.tensor([-1.0, -5.0]), SamplingParams(), 0) == 0
    assert sample(torch.zeros(9), SamplingParams(seed=3), 7) == 0


def test_greedy_ignores_seed_position_and_filters():
    logits = torch.tensor([0.0, 1.0, 0.5])
    params = [SamplingParams(seed=s, top_k=k, top_p=p) for s in (0, 9) for k in (0, 1) for p in (0.1, 1.0)]
    assert {sample(logits, given, n) for given in params for n in range(3)} == {1}


def test_top_k_keeps_the_likeliest_and_of_equals_the_lowest_ids():
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert drawn(logits, top_k=1) == {1}
    assert drawn(logits, top_k=2) == {1, 2}
    assert drawn(logits, top_k=4) == {0, 1, 2, 3}
    assert drawn(logits, top_k=0) == drawn(logits, top_k=99) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {2}),
        (0.49, {2}),
        (0.5, {2}),
        (0.51, {2, 0}),
        (0.75, {2, 0}),
        (0.76, {2, 0, 3}),
        (0.875, {2, 0, 3}),
        (0.9, {2, 0, 3, 1}),
        (1.0, {2, 0, 3, 1}),
    ],
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(top_p, kept):
    """Probabilities 1/4, 1/8, 1/2, 1/8 are exact in binary: so are their sums and the boundaries."""
    logits = torch.tensor([-2.0, -3.0, -1.0, -3.0], dtype=torch.float64) * math.log(2)
    if top_p in (0.5, 0.75, 0.875):  # exp may round the sum to either side of the boundary; stay just below
        top_p -= 1e-12
    order = {0: 0, 1: 3, 2: 2, 3: 1}  # of the equals 1 and 3 the lower id comes first
    assert drawn(logits, top_p=top_p) == {order[t] if t in (1, 3) else t for t in kept}


def test_top_p_counts_within_what_top_k_left():
    """Of 1/2, 1/4, 1/8, 1/8 the first two make 2/3 and 1/3: 0.6 keeps one of them, 0.7 both."""
    logits = logits_of(0.5, 0.25, 0.125, 0.125)
    assert drawn(logits, top_k=2, top_p=0.6) == {0}
    assert drawn(logits, top_k=2, top_p=0.7) == {0, 1}
    assert drawn(logits, top_p=0.6) == {0, 1}


def test_a_draw_depends_on_seed_and_position_alone():
    logits = torch.linspace(0, 1, 64)
    first = [sample(logits, SamplingParams(temperature=1.0, seed=5), n) for n in range(40)]
    assert [sample(logits, SamplingParams(temperature=1.0, seed=5), n) for n in reversed(range(40))] == first[::-1]
    assert len(set(first)) > 10, "positions differ"
    other = [sample(logits, SamplingParams(temperature=1.0, seed=6), n) for n in range(40)]
    assert sum(a != b for a, b in zip(first, other, strict=True)) > 30, "seeds differ"
    assert 0 <= sample(logits, SamplingParams(temperature=1.0, seed=2**64 - 1), 3) < 64


def test_the_draw_inverts_the_distribution_at_the_documented_uniform():
    """The token is the first, likeliest first, whose cumulative probability exceeds u(seed, position)."""
    logits = logits_of(0.1, 0.6, 0.3)
    for position in range(200):
        u = np.random.Generator(np.random.Philox(key=42, counter=position)).random()
        want = 1 if u < 0.6 else 2 if u < 0.9 else 0
        assert sample(logits, SamplingParams(temperature=1.0, seed=42), position) == want


@pytest.mark.parametrize(
    ("params", "law"),
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 1.0, "top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 1.0, "top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_draws_follow_the_law(params, law):
    """Chi-square at a fixed seed: 99.9 % quantile of at most 3 degrees of freedom."""
    draws = 4000
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    tokens = [sample(logits, SamplingParams(seed=1234, **params), n) for n in range(draws)]
    counts = np.bincount(tokens, minlength=4)
    chi = sum((c - draws * p) ** 2 / (draws * p) for c, p in zip(counts, law, strict=True) if p)
    assert chi < 16.27
    assert all(c == 0 for c, p in zip(counts, law, strict=True) if not p)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_an_error(bad, temperature):
    logits = torch.tensor([0.0, bad, 1.0, bad])
    with pytest.raises(RequestError, match="the model gave 2 non-finite logits at position 17"):
        sample(logits, SamplingParams(temperature=temperature), 17)


def test_extreme_logits_and_temperatures_do_not_overflow():
    logits = torch.tensor([3e38, -3e38, 2.9e38])
    assert sample(logits, SamplingParams(temperature=1e-6, seed=1), 0) == 0
    assert drawn(torch.tensor([1e4, 0.0])) == {0}
    assert sample(torch.tensor([2.0]), SamplingParams(temperature=1.0), 0) == 0
