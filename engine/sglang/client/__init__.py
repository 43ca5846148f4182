"""The generator's side: starts SGLang's processes, sends requests, delivers steps to readers."""
