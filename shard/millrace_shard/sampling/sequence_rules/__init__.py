"""Rules of one sequence that few have: tokens it may not have, and the DRY penalty for repeated passages.

Entry point: `rule_table.RuleTable`. Each rule works on one row at a time.
May import: kernels, device, and the files of sampling that import nothing of it.
"""
