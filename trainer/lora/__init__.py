"""LoRA: adapters are trained; the model they are added to does not change."""
