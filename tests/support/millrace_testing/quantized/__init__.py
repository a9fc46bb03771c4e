"""Random quantised linears and tiny checkpoints, packed by the definitions of the formats."""
