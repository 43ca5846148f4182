"""Pure decisions: events in, commands out. Begin with `scheduler.scheduler`."""
