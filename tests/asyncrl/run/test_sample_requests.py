from __future__ import annotations

from fake_processes import task

from asyncrl.run.sample_requests import SampleRequests, sample_seed
from rollout.trajectory import SampleId
from wire.frames import decode_tokens


def test_seeds_depend_on_the_run_the_purpose_and_the_sample() -> None:
    samples = [SampleId(group, sample) for group in range(20) for sample in range(8)]
    seeds = [
        seed
        for run in (0, 1)
        for requests in [SampleRequests(task(), run)]
        for seed in (
            *(requests.generate(sample, 0).seed for sample in samples),
            *requests.verify(samples, 1).seeds,
            *requests.verify(samples, 2).seeds,
            *(requests.evaluate(number, 0, prompt=0).seed for number in (0, 1)),
        )
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (
        sample_seed(0, "training", 3, 1)
        == SampleRequests(task(), 0).generate(SampleId(3, 1), 0).seed
    ), "another generator that repeats a sample gets the same seed"


def test_every_epoch_visits_every_prompt() -> None:
    requests = SampleRequests(task(train=6), 0)
    for epoch in range(3):
        groups = range(6 * epoch, 6 * epoch + 6)
        assert sorted(requests.prompt_index(group) for group in groups) == list(range(6))
    prompt = requests.generate(SampleId(7, 0), 2).prompt
    assert prompt.prompt_id == f"train-{requests.prompt_index(7)}"
    assert decode_tokens(prompt.tokens).tolist() == [requests.prompt_index(7), 7]
