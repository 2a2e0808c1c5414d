import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from duplane.worker.models.minicpm_o.llm.sampling import (
    TIES,
    DrawSettings,
    SeededUniforms,
    choose_ids,
    draw,
    id_masses,
    lowest_kept,
)


@given(st.integers(0, 2**31), st.floats(0.2, 2), st.integers(1, 60), st.floats(0.05, 1.0))
@example(31188, 0.3753805289461216, 18, 1.0)
def test_filtering_keeps_the_nucleus_of_the_top_k(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    columns = [torch.tensor([[value]]) for value in (float(min(top_k, 50)), top_p)]
    scaled = scores / temperature
    ranked, ids = scaled.sort(descending=True)
    kept = scaled[0] >= lowest_kept(ranked[:, :top_k], *columns)[0]
    order = ids[0].tolist()[:top_k]
    mass = (scores[0, order] / temperature).softmax(0)
    expected = set[int]()
    total = 0.0
    for token, share in zip(order, mass.tolist(), strict=True):
        if total > top_p + 1e-6:
            break
        expected.add(token)
        total += share
    # If a sum equals top_p up to rounding, the filter may keep one id more or one id less, or some
    # whose shares together are below the rounding.
    differing = expected ^ set(kept.nonzero().flatten().tolist())
    shares = dict(zip(order, mass.tolist(), strict=True))
    assert len(differing) <= 1 or sum(shares[token] for token in differing) < 1e-5


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 3), (0.999999, 3)])
def test_a_draw_is_the_first_id_whose_mass_exceeds_the_uniform(uniform: float, token: int) -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    assert draw(probabilities, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_uniforms_depend_on_the_seed_and_not_on_how_they_are_read() -> None:
    one, other = SeededUniforms(5), SeededUniforms(5)
    numbers = one.peek(200)
    taken: list[float] = []
    for count in (1, 2, 26, 40, 131):
        taken += other.peek(count)
        other.advance(count)
    assert taken == numbers
    assert all(0 <= number < 1 for number in numbers)
    assert SeededUniforms(6).peek(3) != numbers[:3]
    assert SeededUniforms(None).peek(3) != SeededUniforms(None).peek(3)


@given(st.integers(0, 2**31), st.floats(0, 0.999), st.integers(1, 40), st.floats(0.05, 2.0))
def test_drawing_among_the_candidates_draws_what_all_ids_would(
    seed: int, uniform: float, top_k: int, top_p: float
) -> None:
    scores = torch.randn(1, 4 * TIES, generator=torch.Generator().manual_seed(seed)) * 3
    scores = scores.bfloat16().float()  # rounded, so that some scores are equal
    columns = [torch.tensor([[value]]) for value in (float(top_k), top_p)]
    scaled = scores / 0.7
    floor = lowest_kept(scaled.sort(descending=True).values[:, :top_k], *columns)
    probabilities = scaled.masked_fill(scaled < floor, float("-inf")).softmax(-1)
    expected = draw(probabilities, torch.tensor([uniform], dtype=torch.float64))
    cumulative = probabilities.double().cumsum(-1)
    if bool(((cumulative - uniform).abs() < 1e-6).any()):
        return  # the number is close to the boundary between two ids, so either id is right
    assert torch.equal(
        choose_ids(scores, [DrawSettings(False, 0.7, top_k, top_p)], [uniform])[0], expected
    )


@given(st.integers(0, 2**31), st.floats(0, 0.999))
def test_one_id_is_drawn_exactly_when_draw_draws_it(seed: int, uniform: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 2
    drawn = int(draw(logits.softmax(-1), torch.tensor([uniform], dtype=torch.float64)))
    found: list[int] = []
    for token in range(12):
        before, stop, total = map(float, id_masses(logits, token))
        found += [token] * (before <= uniform * total < stop)
    assert found == [drawn]
