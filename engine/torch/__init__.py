"""The embedded torch engine: any HF causal LM, exact drafting. Begin with `engine.torch.core`."""
