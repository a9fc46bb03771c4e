"""Compiles grammars, follows them along sequences, and computes bitmasks of the allowed tokens.

Entry points: `grammar_compiler.GrammarCompiler`, `manager.GrammarManager`.
Imports: arrays, batch, device, kernels, millrace_proto, process, weights.
"""
