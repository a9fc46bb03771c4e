"""Reads config.json for the families of our own decoder, without `transformers`.

Entry point: `config_reader.ConfigReader`.
"""
