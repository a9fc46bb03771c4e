"""What each field of a request is for, its range and its default, in words.

Entry point: `texts.describe`, which puts them into the schemas of the OpenAPI document.
May import: nothing.
"""
