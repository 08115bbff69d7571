"""Target and drafter together: live speculative decoding, how much is accepted, and that nothing is lost by it.

One prompt at a time, greedily or at a temperature: written to be checked, not to be fast. Serving is for others.
"""
