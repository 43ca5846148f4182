"""Pure decisions, events in and commands out, and the messages of the wire."""
