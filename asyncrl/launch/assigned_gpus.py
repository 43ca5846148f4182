"""A process that was given GPUs must find them: on a CPU it would be some hundred times slower."""

from __future__ import annotations

import torch

from asyncrl.errors import UserError
from asyncrl.launch.child_spec import ChildSpec


def check_given_gpus(spec: ChildSpec) -> None:
    """Compare what the launcher gave with what torch finds.

    Raises:
        UserError: torch finds fewer.
    """
    found = torch.cuda.device_count() if spec.gpus and torch.cuda.is_available() else 0
    if found < spec.gpus:
        raise UserError(
            f"the launcher gave {spec.name} {spec.gpus} GPU(s), and torch {torch.__version__} "
            f"finds {found} on its node: install the driver and a torch for CUDA there, use an "
            "image that has them (launcher.ray.image), correct `ray start --num-gpus`, or "
            "set engine.device and trainer.device to cpu"
        )
