"""Data sets of users: read, mapped by their function, and turned into questions."""
