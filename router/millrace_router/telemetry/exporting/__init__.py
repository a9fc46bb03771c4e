"""The process that exports spans over OTLP, with OpenTelemetry's SDK.

Entry point: `python -m millrace_router.telemetry.exporting`, which reads lines of JSON: settings, then spans. No other
code of the router imports the SDK.
"""
