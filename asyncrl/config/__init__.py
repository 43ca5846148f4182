"""A run's configuration: its sections, its rules, and what is said about a wrong one.

Sections of one component (`engine`, `trainer`, `rewards`, ...) are in that component's package.
`run_config` puts them together.
"""
