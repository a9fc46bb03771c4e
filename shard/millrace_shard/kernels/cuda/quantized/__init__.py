"""Linears over weights of 4 and 8 bits, whose codes stay packed on the device.

Entry point: `quantized_linear.linear_of_parts`.
"""
