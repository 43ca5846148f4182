"""Supervised fine-tuning (`asyncrl sft`): the learner of `asyncrl run`, on rows instead of samples.

What trains, shards, adapts and saves belongs to `asyncrl.trainer`; rows become tokens in
`asyncrl.tasks.examples`.
"""
