"""The built-in tasks, and the models made for them."""
