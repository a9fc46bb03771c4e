"""Compiles grammars, follows them along sequences, and computes bitmasks of the allowed tokens.

Entry points: `grammar_compiler.GrammarCompiler`, `manager.GrammarManager`.
May import: batch, weights, kernels, device.
"""
