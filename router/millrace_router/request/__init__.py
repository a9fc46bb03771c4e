"""What was asked, and a request's life: its parameters, entry, stream and events.

Entry points: `request.ValidRequest`, `entry.Entry`.
May import: text, telemetry, errors.
"""
