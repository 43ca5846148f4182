"""LoRA: adapters are trained, and the model that they are added to stays as it is."""
