"""The generator's side: starts SGLang's processes, sends requests, hands steps to their readers."""
