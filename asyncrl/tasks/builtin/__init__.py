"""The built-in tasks, and the models that are made for them."""
