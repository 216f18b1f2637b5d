"""Attention over the channels of a block's branch, registered on the depth axis: the baselines of layer attention."""
