"""The envelopes of KServe, SageMaker and Vertex AI.

Entry points: `register` of the three platforms.
Imports: api.body, api.chat, api.openai, api.tgi, errors, request, server, version.
"""
