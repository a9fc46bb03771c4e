"""Grammars compiled, followed and turned into bitmasks.

Entry points: `grammar_compiler.GrammarCompiler`, `manager.GrammarManager`.
May import: batch, model_loader, kernels, device.
"""
