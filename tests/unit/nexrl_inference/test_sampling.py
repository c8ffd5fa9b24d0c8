import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nexrl_inference.builtin.sampling import SamplingBatch, sample_tokens, sampled_logprobs, uniforms


def batch(rows: list[tuple[float, float, int]], uniforms: list[float] | None = None) -> SamplingBatch:
    """Rows of (temperature, top_p, top_k)."""
    temperatures, top_ps, top_ks = zip(*rows, strict=True)
    return SamplingBatch(
        temperature_B=torch.tensor(temperatures, dtype=torch.float32),
        top_p_B=torch.tensor(top_ps, dtype=torch.float32),
        top_k_B=torch.tensor(top_ks),
        uniforms_B=torch.tensor(uniforms or [0.5] * len(rows), dtype=torch.float64),
    )


def reference(
    logits_V: Tensor, temperature: float, top_p: float, top_k: int
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The textbook, one row at a time, in float64 NumPy: probabilities [V]."""
    scores = logits_V.double().numpy() / (temperature or 1.0)
    probabilities: np.ndarray[tuple[int], np.dtype[np.float64]] = np.exp(scores - scores.max())
    if temperature == 0:
        top_p, top_k = 1.0, 0
    order = np.argsort(-scores, kind="stable")
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    if top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= top_p:
                probabilities[token] = 0
            mass += probabilities[token]
    probabilities /= probabilities.sum()
    return probabilities


settings_strategy = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.sampled_from([0.05, 0.4, 0.9, 1.0]), st.sampled_from([0, 1, 2, 5, 100])
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(settings_strategy, min_size=1, max_size=6), seed=st.integers(0, 10_000))
def test_logprobs_are_of_the_truncated_renormalised_distribution(
    rows: list[tuple[float, float, int]], seed: int
) -> None:
    logits_BV = torch.randn(len(rows), 9, generator=torch.Generator().manual_seed(seed)) * 3
    probabilities_BV = sampled_logprobs(logits_BV, batch(rows)).exp()
    for row, (temperature, top_p, top_k) in enumerate(rows):
        expected_V = reference(logits_BV[row], temperature, top_p, top_k)
        np.testing.assert_allclose(probabilities_BV[row].numpy(), expected_V, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(settings_strategy, min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(0.0), st.just(1 - 2**-53)),
)
def test_a_drawn_token_is_never_impossible(rows: list[tuple[float, float, int]], seed: int, uniform: float) -> None:
    logits_BV = torch.randn(len(rows), 9, generator=torch.Generator().manual_seed(seed)) * 30
    logits_BV[:, [0, -1]] = -torch.inf
    tokens_B, logprobs_B = sample_tokens(logits_BV, batch(rows, [uniform] * len(rows)))
    assert torch.isfinite(logprobs_B).all()
    assert ((tokens_B > 0) & (tokens_B < 8)).all()


def test_uniform_numbers_select_tokens_in_proportion_to_their_probability() -> None:
    n = 10_000
    probabilities_V = torch.tensor([0.5, 0.2, 0.05, 0.25])
    uniforms = [(i + 0.5) / n for i in range(n)]
    tokens_B, logprobs_B = sample_tokens(probabilities_V.log().expand(n, 4), batch([(1.0, 1.0, 0)] * n, uniforms))
    torch.testing.assert_close(tokens_B.bincount() / n, probabilities_V, atol=2 / n, rtol=0)
    torch.testing.assert_close(logprobs_B, probabilities_V.log()[tokens_B])


def test_random_numbers_are_those_of_the_generator_that_the_seed_starts() -> None:
    def mixed(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    for seed in (0, 1, 2**63 - 1):
        state = mixed((seed + 0x9E3779B97F4A7C15) % 2**64)
        for draw in range(3):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            assert uniforms([seed], [draw])[0] == (mixed(state) >> 11) / 2**53


def test_random_numbers_are_uniform_over_seeds_and_over_draws() -> None:
    n = 20_000
    for numbers in (uniforms(range(n), [0] * n), uniforms([5] * n, range(n))):
        assert ((numbers >= 0) & (numbers < 1)).all()
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert (abs(counts - n / 20) < 5 * (n * 0.05 * 0.95) ** 0.5).all()
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / n**0.5


def test_greedy_takes_the_likeliest_token_with_the_models_own_logprob() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 2.0]])
    tokens_B, logprobs_B = sample_tokens(logits_BV, batch([(0.0, 0.1, 1)], [0.99]))
    assert tokens_B.tolist() == [1]
    assert logprobs_B.item() == pytest.approx(logits_BV.log_softmax(-1)[0, 1].item())


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    probabilities_V = sampled_logprobs(torch.zeros(1, 8), batch([(1.0, 1.0, 3)])).exp()[0]
    assert sorted(probabilities_V.tolist()) == pytest.approx([0.0] * 5 + [1 / 3] * 3)
