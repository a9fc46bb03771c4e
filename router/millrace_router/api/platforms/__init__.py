"""The envelopes of KServe, SageMaker and Vertex AI.

Entry points: `register` of the three `*_routes`.
May import: api.tgi, api.completions, api.openai, server and below.
"""
