"""The envelopes of KServe, SageMaker and Vertex AI.

Entry points: `register` of the three platforms.
May import: api.tgi, api.openai, api.chat, api.body, server and below.
"""
