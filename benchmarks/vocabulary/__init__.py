"""Verification and drawing under a real vocabulary."""
