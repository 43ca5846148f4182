"""SGLang's side: drawing, drafting, scoring and weights inside its scheduler process."""
