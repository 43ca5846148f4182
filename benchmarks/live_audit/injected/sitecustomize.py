"""Makes a run wrong, to see that the audit finds it. Only loaded by runs that the audit spoils.

Python imports this file in each process of such a run. When the module of the mutant has been
imported, the mutant replaces something in it.
"""

import importlib.abc
import importlib.util
import os
import sys


def accept_too_often(module):
    """Verification accepts as if the old probabilities were 0.6 of what they were."""
    right = module.verify_kept

    def wrong(symbols, behaviour, current, **more):
        return right(symbols, behaviour - 0.5, current, **more)

    module.verify_kept = wrong


def accept_all(module):
    right = module.verify_kept

    def wrong(symbols, _, current, **more):
        return right(symbols, current, current, **{**more, "renamed": None})

    module.verify_kept = wrong


def drafts_too_often(module):
    """One in ten drafted tokens that were not drawn is accepted."""
    import numpy as np

    right, rng = module.accept_tree, np.random.default_rng()

    def wrong(samples, tokens, parents, offsets):
        samples, starts = np.array(samples), np.asarray(offsets)
        for row in range(len(starts) - 1):
            if starts[row + 1] > starts[row] and rng.random() < 0.1:
                samples[starts[row] + row] = tokens[starts[row]]
        return right(samples, tokens, parents, offsets)

    module.accept_tree = wrong


def shared_seeds(module):
    """Samples 0 and 1 of a group, 2 and 3, ... have the same seeds."""
    right = module.SampleRequests._sample_seed  # noqa: SLF001

    def wrong(self, purpose, sample, *more):
        return right(self, purpose, type(sample)(sample.group, sample.sample // 2), *more)

    module.SampleRequests._sample_seed = wrong  # noqa: SLF001


def unlikely_ones_again(module):
    """Half of the responses with a log-probability below -8 are drawn again."""
    import random

    right = module.SampleGeneration.end_attempt

    def wrong(self, reason):
        found = right(self, reason)
        if found not in ("stop", "length") or random.random() < 1 / 2:
            return found
        if float(self.builder.finish("abort").behaviour_logprobs.sum()) > -8:
            return found
        self.clear_tokens()
        self.tokens_to_verify = None
        self.seed = random.getrandbits(62)
        return None

    module.SampleGeneration.end_attempt = wrong


MUTANTS = {
    "accept-too-often": ("asyncrl.engine.sampling.verification", accept_too_often),
    "accept-all": ("asyncrl.engine.sampling.verification", accept_all),
    "drafts-too-often": ("asyncrl.engine.torch.drafting", drafts_too_often),
    "shared-seeds": ("asyncrl.tasks.sample_requests", shared_seeds),
    "unlikely-ones-again": ("asyncrl.generator.sample_state", unlikely_ones_again),
}


class _After(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it has been imported."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, *_):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute, change = spec.loader.exec_module, self.change

        def then(module):
            execute(module)
            change(module)

        spec.loader.exec_module = then
        return spec


if (wanted := os.environ.get("ASYNCRL_AUDIT_MUTANT")) in MUTANTS:
    sys.meta_path.insert(0, _After(*MUTANTS[wanted]))
