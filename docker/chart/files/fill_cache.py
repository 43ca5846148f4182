"""Fills the cache of a new pod: fill_cache.py {builtin,none}

The image has compiled kernels in /cache, which the pod's own cache hides. With `builtin`, the
built-in model is made as well, where the pod's agent looks for it.
"""

import os
import pathlib
import shutil
import sys

IMAGE, POD = pathlib.Path("/cache"), pathlib.Path("/pod/cache")

for one in IMAGE.iterdir() if IMAGE.is_dir() else ():
    try:
        shutil.copytree(one, POD / one.name, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:  # it is only a cache: what is missing is made again
        sys.stdout.write(f"{one} is not copied as a whole: {error}\n")
if sys.argv[1] == "builtin":
    os.environ["XDG_CACHE_HOME"] = os.environ["HOME"] = str(POD)
    os.environ["NUMBA_CACHE_DIR"] = str(POD / "numba")
    from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model

    sys.stdout.write(f"{ensure_builtin_model(default_cache_dir())}\n")
