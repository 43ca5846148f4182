"""Errors of the sandbox. Import-light."""

from __future__ import annotations

from asyncrl.errors import UserError


class SandboxError(UserError):
    """This machine cannot contain a program. Nothing was run."""
