"""Worker processes for functions of users: how they are started, watched, limited and ended.

`rewards`, `environments` and `tasks` decide what runs in them.
"""
