"""The router's side of the wire: calls to all ranks of a group, and one stream of numbered steps.

Entry points: `group.ShardGroup`, `step_channel.StepChannel`.
Imports: millrace_proto, request, scheduler, telemetry.
"""
