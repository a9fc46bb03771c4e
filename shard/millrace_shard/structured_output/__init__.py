"""Grammars compiled, followed and turned into bitmasks.

Entry points: `grammar_compiler.GrammarCompiler`, `manager.Guides`.
May import: batch, model_loader, kernels, device.
"""
