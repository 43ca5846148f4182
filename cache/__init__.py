"""The tree of earlier rollouts per prompt, and drafting from it. It can only change speed."""

if __name__ == "cache":
    raise ImportError("asyncrl's package cache is imported as asyncrl.cache", name="cache")
