"""Makes the built-in model in this pod's cache, where the agents look for it."""

import sys

from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model

sys.stdout.write(f"{ensure_builtin_model(default_cache_dir())}\n")
