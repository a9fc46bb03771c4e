"""Pictures in requests: where they come from, what the model's processor makes of them, and how much memory they take.

Only the preparing process decodes pictures. Entry points: `store.ImageStore`, `sources.image_source`.
Imports: errors, request, telemetry, text.
"""
