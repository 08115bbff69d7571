"""Target and drafter together: live speculative decoding, how much is accepted, and that nothing is lost by it.

Greedy decoding of one prompt at a time, written to be checked and not to be fast; serving is for other programs.
"""
