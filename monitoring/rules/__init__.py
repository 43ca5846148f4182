"""Recording and alert rules for Prometheus, and the same with shorter times (`--faster`)."""
