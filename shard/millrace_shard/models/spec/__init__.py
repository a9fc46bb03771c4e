"""Values that describe a decoder; they compute nothing.

Entry point: `decoder_spec.DecoderSpec`.
"""
