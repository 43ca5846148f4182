"""A generator as the scheduler's commands and events describe it, without an engine."""

from dataclasses import dataclass, field

from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId
from asyncrl.scheduler.commands import ReleaseSamples, RewindGenerator, VerifySamples


@dataclass
class FakeGenerator:
    name: str
    slots: int
    version: int
    limit: int
    running: dict[SampleId, int | None] = field(default_factory=dict)
    """Oldest version of each running sample, in the order of arrival; None: no token yet."""
    held: dict[SampleId, int] = field(default_factory=dict)
    """Oldest version of each finished sample."""
    newest: dict[SampleId, int] = field(default_factory=dict)
    """Newest version of each finished sample."""
    sending: set[SampleId] = field(default_factory=set)
    """Held samples that it was told to deliver."""
    verifying: dict[SampleId, int] = field(default_factory=dict)
    unread: list[VerifySamples | RewindGenerator | ReleaseSamples] = field(default_factory=list)
    """Commands that it has not read yet."""
    install: int | None = None
    """Version that it was told to install."""
    verify_at_install: tuple[VerifySamples, ...] = ()
    """What it was told to verify as soon as that version is installed."""
    reported: int = -1
    """Version that it has reported; an installed one may be newer."""
    paused: bool = False
    kv_used: float = 0.0
    away: set[SampleId] = field(default_factory=set)
    """Running samples that wait for their environment."""
    told_away: int = 0
    """How many it has reported."""

    def enabled(self, trained, overwrites, trainer):
        """What can happen next here; `overwrites`: an install may find its weights overwritten."""
        happenings = []
        if not self.paused and self.version >= 0:
            decoding = [s for s in self.running if s not in self.away]
            happenings += [("finish", self.name, s) for s in decoding[: self.slots]]
            happenings += [("verified", self.name, s) for s in list(self.verifying)[: self.slots]]
        if self.unread:
            happenings.append(("read", self.name, len(self.unread)))
        rewinds = any(isinstance(command, RewindGenerator) for command in self.unread)
        if trainer and not rewinds:
            happenings += [("arrive", self.name, s) for s in sorted(self.sending)]
        if self.install is not None and self.install == self.version:
            happenings.append(("report", self.name, self.install))
        elif self.install is not None:
            happenings.append(("install", self.name, self.install))
            if overwrites and self.install < trained:
                happenings.append(("miss", self.name, self.install))
        return happenings

    def verify(self, command):
        """Verify the samples that it still has and that are too old.

        Returns the held samples that need no verification, and the number of others.
        """
        assert self.version >= command.min_version
        verified, unchanged = 0, []
        for sample in command.samples:
            if self.running.get(sample, command.min_version) < command.min_version:
                self.running[sample] = self.version
            elif self.verifying.get(sample, command.min_version) < command.min_version:
                self.verifying[sample] = self.version  # interrupted, and verified again
            elif sample in self.sending:
                assert self.held[sample] >= command.min_version
            elif sample in self.held and self.held[sample] >= command.min_version:
                unchanged.append(sample)
            elif sample in self.held:
                del self.held[sample]
                self.verifying[sample] = self.version
                verified += 1
        return unchanged, verified

    def rewind(self, version):
        """Relabel the tokens of policies that are gone; deliver nothing to the lost trainer."""
        for held in (self.held, self.verifying):
            for sample in held:
                if self.newest.get(sample, self.version) > version:
                    held[sample] = UNKNOWN_VERSION
        if self.version > version:
            self.running = {
                sample: None if oldest is None else UNKNOWN_VERSION
                for sample, oldest in self.running.items()
            }
            self.verifying = dict.fromkeys(self.verifying, UNKNOWN_VERSION)
            self.version = -1
        self.reported, self.verify_at_install = self.version, ()
        self.sending.clear()
        self.install = None

    def installed(self, version):
        """The weights are in use, which is reported later; verify what is due with them.

        Returns what `verify` does, for all.
        """
        self.version = version
        for sample, oldest in self.running.items():
            self.running[sample] = version if oldest is None else oldest
        all_unchanged, all_verified = [], 0
        due, self.verify_at_install = self.verify_at_install, ()
        for command in due:
            unchanged, verified = self.verify(command)
            all_unchanged += unchanged
            all_verified += verified
        return all_unchanged, all_verified

    def discard(self, samples):
        for sample in samples:
            self.away.discard(sample)
            self.running.pop(sample, None)
            self.held.pop(sample, None)
            self.verifying.pop(sample, None)
            self.newest.pop(sample, None)
            self.sending.discard(sample)
