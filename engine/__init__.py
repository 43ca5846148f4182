"""Engines: one small protocol, and behind it the embedded torch engine, vLLM and SGLang."""

if __name__ == "engine":
    raise ImportError("asyncrl's package engine is imported as asyncrl.engine", name="engine")
