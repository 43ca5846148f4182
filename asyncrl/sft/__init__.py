"""Supervised fine-tuning (`asyncrl sft`): the learner of `asyncrl run`, on rows instead of samples.

`asyncrl.trainer` trains, shards, adapts and saves; `asyncrl.tasks.examples` tokenises rows.
"""
