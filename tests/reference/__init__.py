"""Slow oracles in float64, written from the definition of DFlash alone; they share no code with the product.

Words and shapes: a row has T token slots with documents one after the other; N blocks of B slots start at anchors; H is
the hidden size, K the number of captured layers, V the vocabulary. Everything here takes one row.
"""
