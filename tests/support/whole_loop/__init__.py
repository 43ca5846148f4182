"""The whole loop with every part real but the trainer, next to enumerated distributions.

Two fixed sets of weights take turns as policy versions, so that the distribution of each step's
trajectories can be enumerated (`modes`), while updates arrive in the middle of rollouts
(`harness`). The statements, each with a p-value (`statements`):

    texts        whole trajectories of the steps of one policy follow that policy
    lengths      so do the response lengths within each step, and their mean: no step favours short
                 answers
    tokens       each token, given the tokens before it, follows the policy of its version
    logprobs     recorded log-probabilities are the enumerated ones (greatest difference)

`verify` with k = 0 and learning rate 0 promise the first two, every mode the last two.
"""
