"""The methods of quantised checkpoints: each reads its settings, and linears in its layout.

Entry points: the function of each file that has its name. May import: the files of the room above.
"""
