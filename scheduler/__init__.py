"""Pure decisions: events in, commands out. Begin with `asyncrl.scheduler.scheduler`."""

if __name__ == "scheduler":
    raise ImportError(
        "asyncrl's package scheduler is imported as asyncrl.scheduler", name="scheduler"
    )
