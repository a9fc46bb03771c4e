"""Charts as SVG text, without a plotting library.

Entry points: `lines.curves`, the parts in `svg`. May import: no other room.
"""
