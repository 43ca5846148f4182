"""Resource limits of a program in the sandbox. Import-light: reward workers load this file."""

import msgspec

from asyncrl.errors import UserError


class SandboxError(UserError):
    """This machine cannot contain a program. Nothing was run."""


MIB = 1 << 20


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one run of a program, with all processes that it starts."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * MIB
    """Address space of each process, and all memory that they hold together, pipes included."""
    processes: int = 16
    output_bytes: int = 256 * 1024
    """Standard output and standard error together; a program that exceeds it is killed."""
    disk_bytes: int = 16 * MIB
    files: int = 1024
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.memory_bytes < 32 * MIB:
            raise ValueError(f"memory_bytes must be at least 32 MiB, not {self.memory_bytes}")
