from __future__ import annotations

import pytest
from fake_processes import task

from asyncrl.rollout.trajectory import SampleId
from asyncrl.tasks.sample_requests import SampleRequests, sample_seed
from asyncrl.wire.messages.data import decode_tokens
from asyncrl.wire.messages.to_generator import FixedVersion

SAMPLES = [SampleId(group, sample) for group in range(20) for sample in range(8)]


def requests_of(seed: int = 0, weights: str = "model", train: int = 6) -> SampleRequests:
    requests = SampleRequests(task(train=train), seed)
    requests.starts_from(weights)
    return requests


def seeds_of(requests: SampleRequests) -> list[int]:
    """Those of training."""
    return [
        *(requests.generate(sample, 0).seed for sample in SAMPLES),
        *requests.verify(SAMPLES, 1).seeds,
        *requests.verify(SAMPLES, 2).seeds,
    ]


def evaluation_seeds(requests: SampleRequests) -> list[int]:
    (prompt, *_) = requests.held_out["held_out"]
    rounds = [requests.evaluate(number, 0, prompt, (number,)) for number in (0, 1)]
    fixed = FixedVersion(3, ahead=True, hold_seconds=1.0)
    during = requests.evaluate(2, 0, prompt, ("step", 3), fixed)
    assert during.fixed is not None
    return [*(one.seed for one in (*rounds, during)), during.fixed.verify_seed]


def test_seeds_depend_on_the_run_the_weights_the_purpose_and_the_sample() -> None:
    runs = [requests_of(seed, weights) for seed in (0, 1) for weights in ("model", "other", "")]
    seeds = [seed for requests in runs for seed in seeds_of(requests)]
    seeds += [seed for requests in runs[::3] for seed in evaluation_seeds(requests)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds_of(requests_of()) == seeds_of(requests_of()), (
        "another generator that repeats a sample, and a second run from the same model, get the "
        "same seeds"
    )


def test_all_models_are_evaluated_on_the_same_random_numbers() -> None:
    assert evaluation_seeds(requests_of(weights="other")) == evaluation_seeds(requests_of())
    unknown = SampleRequests(task(), 0)  # an evaluation may begin before the trainer is ready
    assert evaluation_seeds(unknown) == evaluation_seeds(requests_of())


def test_a_run_from_another_model_visits_the_prompts_in_another_order() -> None:
    orders = {
        tuple(requests_of(0, weights, train=50).prompt_index(group) for group in range(50))
        for weights in ("model", "other", "")
    }
    assert len(orders) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(50))}


def test_a_run_from_before_digests_were_recorded_keeps_its_random_numbers() -> None:
    requests = requests_of(0, "")
    assert requests.generate(SampleId(3, 1), 0).seed == sample_seed(0, "training", 3, 1)
    assert requests.verify([SampleId(3, 1)], 2).seeds == (sample_seed(0, "verify", 3, 1, 2),)


def test_no_sample_is_requested_before_the_initial_weights_are_known() -> None:
    requests = SampleRequests(task(), 0)
    with pytest.raises(RuntimeError, match="not known yet"):
        requests.generate(SampleId(0, 0), 0)
    requests.starts_from("model")
    requests.starts_from("model")
    with pytest.raises(ValueError, match="starts from the weights 'model', not 'other'"):
        requests.starts_from("other")


def test_every_epoch_visits_every_prompt() -> None:
    requests = requests_of()
    for epoch in range(3):
        groups = range(6 * epoch, 6 * epoch + 6)
        assert sorted(requests.prompt_index(group) for group in groups) == list(range(6))
    prompt = requests.generate(SampleId(7, 0), 2).prompt
    assert prompt.prompt_id == f"train-{requests.prompt_index(7)}"
    assert decode_tokens(prompt.tokens).tolist() == [requests.prompt_index(7), 7]
