"""The flow from rewards to token advantages and weights: pure tensors, the chain of hooks, signal, text alignment."""
