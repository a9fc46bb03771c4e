"""Programs that stages start as children: steps under a sanitizer, planted faults.

May import: `engine`.
"""
