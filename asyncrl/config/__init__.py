"""A run's configuration: its sections, its rules, and its error messages.

Sections of one component (`engine`, `trainer`, `rewards`, ...) are in that component's package.
`run_config` combines them.
"""
