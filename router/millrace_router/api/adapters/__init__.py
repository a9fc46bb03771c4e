"""LoRA adapters in requests and answers: LoRAX's fields, names of models, and headers.

Entry points: `naming.adapter_of_model`, `naming.adapter_of_fields`.
May import: api.fields, server and below.
"""
