"""Time and peak memory of the op against full attention, as ratios within one run, and what a model predicts of them.

Nothing is timed before every pattern has agreed with the oracle on the device and dtype at hand.
"""
