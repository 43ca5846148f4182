"""Decides what to draft, and how much. Drafts can only change speed."""
