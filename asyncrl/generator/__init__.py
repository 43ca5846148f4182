"""The generator process: samples from the first command to the acknowledged delivery.

A sample is in one of six states, each with one owner:

    state      owner                                  what it has
    waiting    `sample_state.SampleGeneration`        tokens, those to verify; no slot
    running    the same                               a request of the engine: an attempt
    answered   `turns.environment_turns.Episodes`     an environment that answers; no slot
    held       `sample_table.Samples.held`            its trajectory, a task for its reward
    sent       `deliveries.Deliveries`                an unacknowledged message
    forgotten  none

`sample_runner.SampleGenerator` takes a sample from waiting to held, `sample_table.Samples` starts,
holds and forgets samples, `process` dispatches commands to them.

    event                    in          then
    Generate                 -           waiting; tokens from before a resume are to be verified
    an attempt may begin     waiting     running
    stop, turn limit         running     answered with an environment, else held
    length, deadline         running     held
    interrupted              running     waiting: its slot or its KV is needed, or weights are new
    it answered              answered    waiting for the next turn, or held
    it cannot go back        answered    waiting, without its tokens: it starts over
    Verify, if too old       running     interrupted; the next attempt verifies its tokens
                             answered    the same once it has answered
                             held        waiting, to verify its tokens; else reported once more
    Deliver                  held        sent once its reward is known
    no answer in time        sent        sent once more
    Acknowledged             sent        forgotten, and reported to the controller
    Rewind (trainer lost)    running     waiting; versions of the lost trainer are forgotten
                             held        held, the same
                             sent        forgotten: its group is generated again
    Discard                  any         forgotten

All that a sample's tokens depend on is decided before they are looked at (docs/exactness.md).
"""
