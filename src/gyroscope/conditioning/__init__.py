"""Layer-wise conditioning: where the loss is steep, and which layer is hard to train (Huang et al., 2020)."""
