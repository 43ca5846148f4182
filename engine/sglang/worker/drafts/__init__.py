"""Decode steps with drafts in SGLang: its speculative worker, trees, and acceptance."""
