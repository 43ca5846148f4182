"""`asyncrl reward-server`: a sequence classifier behind HTTP, for the reward `reward_model`."""
