"""The part of a class of `transformers` that one rank has, by the class's own tensor-parallel plan.

Entry points: `class_split.plan_for`, `class_split.layer_shape`, `split_modules.split_modules`.
"""
