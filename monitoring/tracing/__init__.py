"""Traces of groups of samples, from the draw of the prompt to the optimizer step.

`export` alone imports the OpenTelemetry SDK, and only if `monitoring.tracing.enabled` is set.
"""
