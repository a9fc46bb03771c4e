"""Programs that stages start as children: servers on interpreted kernels, steps under a sanitizer, planted faults.

May import: `engine`.
"""
