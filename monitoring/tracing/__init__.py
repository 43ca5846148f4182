"""Traces of groups of samples, from the draw of the prompt to the optimizer step.

tracer    called by the processes
export    sends records to an OpenTelemetry collector; the only module that imports its SDK
opening   makes a tracer with its export

Unless `monitoring.tracing.enabled` is set, there is no tracer and the SDK is not imported.
"""
