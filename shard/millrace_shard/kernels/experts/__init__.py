"""Mixtures of experts: the router's choice, the weights of experts, and experts composed of linears.

Entry points: `mixture.Mixture`, `composed_experts.ComposedExperts`.
"""
