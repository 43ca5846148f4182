"""Pure decisions: events in, commands out."""
