"""Generators: one small protocol, and the engines behind it (embedded torch, vLLM)."""

if __name__ == "engine":
    raise ImportError("asyncrl's package engine is imported as asyncrl.engine", name="engine")
